// Unicode as the reference tokenizer library (tokenizers 0.23.2) sees it. Its regular expressions
// have the character classes of Unicode 16, its NFC those of Unicode 9, whatever the versions of
// PCRE2 and utf8proc on this machine; both tables were measured against it, code point by code
// point.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace marrow {

// A code point and the bytes it takes in UTF-8.
struct CodePoint {
  uint32_t value;
  uint32_t size;
};
CodePoint decode_utf8(const char* text);  // `text` is valid UTF-8

// Offset of the first byte that is not valid UTF-8, or text.size(). `ascii_only` says whether
// there was no byte above 0x7f before it.
size_t find_invalid_utf8(std::string_view text, bool& ascii_only);

// A code point that PCRE2's Unicode 14 puts in the class that Unicode 16 gives `code_point`, of
// equal UTF-8 length and near it in value, so that explicit ranges agree too; 0 for code points
// whose class did not change.
uint32_t class_stand_in(uint32_t code_point);

// Replaces `classes` by `text` with each character by its stand-in. False (and `classes` left as
// it was) if there is nothing to replace.
bool make_class_text(std::string_view text, std::string& classes);

// Bytes of the White_Space characters at the end or at the start of `text`.
size_t trailing_space(std::string_view text);
size_t leading_space(std::string_view text);

class NfcNormalizer {
 public:
  NfcNormalizer();
  // Appends the normal form of `text` (valid UTF-8) to `out`.
  void append(std::string_view text, std::string& out) const;

 private:
  // Never changes, and never changes or moves what stands before it: text may be cut before it.
  bool is_plain(uint32_t code_point) const;
  std::vector<bool> plain_;  // [0x30000]
};

}  // namespace marrow
