// One string out of a JSON line.

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/json.h"
#include "data/document_source.h"

namespace marrow {
namespace {

// RFC 8259's grammar. Bytes above 0x7f, checked before, only appear in strings.
const std::string kGrammar = R"re((?(DEFINE)
  (?<space>  [ \t\r\n]*+ )
  (?<string> " (?: [^"\\\x00-\x1f]++ | \\ (?: ["\\/bfnrt] | u [0-9A-Fa-f]{4} ) )*+ " )
  (?<number> -? (?: 0 | [1-9][0-9]*+ ) (?: \. [0-9]++ )? (?: [eE] [+-]? [0-9]++ )? )
  (?<array>  \[ (?&space) (?: \] | (?&value) (?&space) (?: , (?&space) (?&value) (?&space) )*+ \] ) )
  (?<member> (?&space) (?&string) (?&space) : (?&space) (?&value) (?&space) )
  (?<object> \{ (?&space) (?: \} | (?&member) (?: , (?&member) )*+ \} ) )
  (?<value>  (?: (?&string) | (?&object) | (?&array) | (?&number) | true | false | null ) )
))re";

// A string as it stands in JSON, quotes included; nothing at half a surrogate pair.
std::optional<std::string> decode(std::string_view literal) {
  const std::string_view inner = literal.substr(1, literal.size() - 2);
  if (inner.find('\\') == std::string_view::npos) return std::string(inner);
  try {
    return Json::parse(literal, "a string").as_string();
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string what_is_wrong(std::string_view line) {
  try {
    Json::parse(line, "the line");
  } catch (const Error& error) {
    const std::string_view what = error.what();  // "… at line 1, column 5: syntax error …"
    return std::string(what.substr(std::min(what.find("column "), what.size()), 200));
  }
  return "the line is no JSON value";  // the library takes a little more than the standard
}

}  // namespace

JsonField find_json_string(std::string_view line, std::string_view field, RegexScratch& scratch) {
  static const Regex whole("(?x) \\A (?&space) (?&value) (?&space) \\z" + kGrammar, Regex::Unit::kBytes);
  static const Regex member(
      "(?x) \\G [{,] (?&space) (?<key> (?&string) ) (?&space) : (?&space) (?<text> (?&value) ) (?&space)" + kGrammar,
      Regex::Unit::kBytes);
  try {
    if (!whole.find(line, 0, scratch)) return {input_fault::kNotJson, what_is_wrong(line)};
  } catch (const Error&) {
    return {input_fault::kNotJson, "it is nested too deeply"};
  }
  std::optional<std::string_view> literal;
  for (size_t at = line.find_first_not_of(" \t\r\n"); member.find(line, at, scratch); at = scratch.end()) {
    const auto group = [&](size_t index) {
      return line.substr(scratch.begin(index), scratch.end(index) - scratch.begin(index));
    };
    if (decode(group(1)) != field) continue;
    if (literal) return {input_fault::kNotJson, fmt::format("field \"{}\" appears twice", field)};
    literal = group(2);
  }
  if (!literal) return {input_fault::kMissingField, fmt::format("no field \"{}\"", field)};
  if (literal->front() != '"') {
    return {input_fault::kMissingField, fmt::format("field \"{}\" is no string", field)};
  }
  auto text = decode(*literal);
  if (text) return {{}, std::move(*text)};
  return {input_fault::kInvalidUtf8, fmt::format("half a surrogate pair in \"{}\"", field)};
}

}  // namespace marrow
