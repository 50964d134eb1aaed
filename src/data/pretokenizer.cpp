#include "data/pretokenizer.h"

#include "data/unicode_text.h"

namespace marrow {

bool PreTokenizer::make_classes(std::string_view text, std::string& classes) {
  return make_class_text(text, classes);
}

PreTokenizer::Piece PreTokenizer::add_prefix_space(const Piece& piece, Scratch& scratch) {
  scratch.prefixed.assign(1, ' ').append(piece.text, piece.size);
  if (piece.classes == piece.text) {
    return {scratch.prefixed.data(), scratch.prefixed.data(), scratch.prefixed.size()};
  }
  scratch.prefixed_classes.assign(1, ' ').append(piece.classes, piece.size);
  return {scratch.prefixed.data(), scratch.prefixed_classes.data(), scratch.prefixed.size()};
}

}  // namespace marrow
