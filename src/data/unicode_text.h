// Unicode as the reference tokenizer library (tokenizers 0.23.2) sees it. Its regular expressions have the character
// classes of Unicode 16, its NFC those of Unicode 9, whatever the versions of PCRE2 and utf8proc on this machine; both
// tables were measured against it, code point by code point.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace marrow {

// The first code point of `text` and its bytes in UTF-8; `size` 0 where `text` begins with none.
struct CodePoint {
  uint32_t value, size;
};
CodePoint decode_utf8(std::string_view text);
std::string encode_utf8(uint32_t value);

// Length of the longest valid UTF-8 prefix (Unicode 15, table 3-7: no surrogates, no overlong forms).
size_t valid_utf8_length(std::string_view text);

// `text` (valid UTF-8) as PCRE2 must see it to find the reference's classes: a character that they class differently is
// replaced by one of the right class and of equal length in UTF-8, near it in value so that explicit ranges agree too.
// The result lies in `text` or in `scratch`.
std::string_view class_text(std::string_view text, std::string& scratch);

// The normal form of `text` (valid UTF-8).
std::string to_nfc(std::string_view text);

}  // namespace marrow
