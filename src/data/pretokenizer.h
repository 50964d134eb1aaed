// Cutting text into words: the pre_tokenizer of a tokenizer.json.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/split_regex.h"

namespace marrow {

// What becomes of the delimiters that a stage finds.
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct SplitStage {
  SplitRegex regex;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // delimiters are what the expression does not match
};

// Applies its stages one after the other, each to the pieces that the one before it left: a piece
// is a string of its own, beyond whose ends no expression sees.
class PreTokenizer {
 public:
  std::vector<SplitStage> stages;
  size_t prefix_space_stage = SIZE_MAX;  // before it, a piece that does not start with " " gets one

  struct Scratch {
    RegexScratch regex;
    std::string classes, prefixed, prefixed_classes;
  };

  // Calls word(std::string_view) for every word of `text` (valid UTF-8), in order.
  template <class Word>
  void for_each_word(std::string_view text, bool ascii_only, Scratch& scratch, Word&& word) const {
    const bool replaced = !ascii_only && make_classes(text, scratch.classes);
    run(0, {text.data(), replaced ? scratch.classes.data() : text.data(), text.size()}, scratch,
        word);
  }

 private:
  // Text, and the text of equal length that the expressions see in its place.
  struct Piece {
    const char* text;
    const char* classes;
    size_t size;
    Piece sub(size_t begin, size_t end) const {
      return {text + begin, classes + begin, end - begin};
    }
  };

  static bool make_classes(std::string_view text, std::string& classes);

  template <class Word>
  void run(size_t stage, Piece piece, Scratch& scratch, Word&& word) const {
    if (piece.size == 0) return;
    if (stage == prefix_space_stage && piece.text[0] != ' ') {
      piece = add_prefix_space(piece, scratch);
    }
    if (stage == stages.size()) {
      word(std::string_view(piece.text, piece.size));
      return;
    }
    split(stages[stage], piece, scratch,
          [&](size_t begin, size_t end) { run(stage + 1, piece.sub(begin, end), scratch, word); });
  }

  static Piece add_prefix_space(const Piece& piece, Scratch& scratch);

  // Calls emit(begin, end) for the pieces that `stage` makes of `piece`.
  template <class Emit>
  static void split(const SplitStage& stage, const Piece& piece, Scratch& scratch, Emit&& emit);
};

template <class Emit>
void PreTokenizer::split(const SplitStage& stage, const Piece& piece, Scratch& scratch,
                         Emit&& emit) {
  size_t held_begin = 0, held_end = 0;  // a piece that may still grow
  bool previous = false;                // was the last part a delimiter?
  const auto part = [&](size_t begin, size_t end, bool delimiter) {
    bool grows = false;
    switch (stage.behavior) {
      case SplitBehavior::kIsolated:
        emit(begin, end);
        return;
      case SplitBehavior::kRemoved:
        if (!delimiter) emit(begin, end);
        return;
      case SplitBehavior::kMergedWithPrevious:
        grows = delimiter && !previous;
        break;
      case SplitBehavior::kMergedWithNext:
        grows = !delimiter && previous;
        break;
      case SplitBehavior::kContiguous:
        grows = delimiter == previous;
        break;
    }
    if (!grows && held_begin < held_end) emit(held_begin, held_end);
    if (!grows) held_begin = begin;
    held_end = end;
    previous = delimiter;
  };
  const std::string_view subject(piece.classes, piece.size);
  size_t at = 0, begin = 0, end = 0;
  while (at < piece.size && stage.regex.find(subject, at, scratch.regex, begin, end)) {
    if (at < begin) part(at, begin, stage.invert);
    part(begin, end, !stage.invert);
    at = end;
  }
  if (at < piece.size) part(at, piece.size, stage.invert);
  if (held_begin < held_end) emit(held_begin, held_end);
}

}  // namespace marrow
