// One string out of a JSON line.
#pragma once
#include <string>
#include <string_view>

#include "data/regex.h"

namespace marrow {

// One string of a JSON object, or why there is none.
struct JsonField {
  enum class Status { kFound, kNotJson, kMissing, kLoneSurrogate } status = Status::kNotJson;
  std::string text;    // the decoded string
  std::string detail;  // for people: what is wrong
};

// Checks all of `line` (valid UTF-8) against RFC 8259 and returns its top-level string `field`.
// A field that is absent or no string is kMissing, one that appears twice makes the line kNotJson.
// "\ud83d\ude00" is one character; half of such a pair has no UTF-8 form and is kLoneSurrogate
// (only in `field`: other strings are not decoded).
JsonField find_json_string(std::string_view line, std::string_view field, RegexScratch& scratch);

}  // namespace marrow
