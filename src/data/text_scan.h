// UTF-8 and JSON lines, checked strictly at memory speed.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace marrow {

// Length of the longest valid UTF-8 prefix of `text` (Unicode 15, table 3-7: no surrogates, no
// overlong forms): text.size() where all of it is valid.
size_t valid_utf8_length(std::string_view text);

// One string of a JSON object, or why there is none.
struct JsonField {
  enum class Status { kFound, kNotJson, kMissing, kLoneSurrogate } status = Status::kNotJson;
  std::string_view text;  // the decoded string, in the line or in the caller's scratch
  std::string detail;     // for people: what is wrong, and at which byte
};

// Checks all of `line` (valid UTF-8) against RFC 8259 and returns its top-level string `field`.
// A field that is absent or no string is kMissing, one that appears twice makes the line kNotJson,
// as does nesting deeper than 500. "\ud83d\ude00" is one character; half of such a pair has no
// UTF-8 form and is kLoneSurrogate (only in `field`: other strings are not decoded).
JsonField find_json_string(std::string_view line, std::string_view field, std::string& scratch);

}  // namespace marrow
