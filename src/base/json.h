// Reading JSON with errors that name the file and the path of the value ("model.vocab").
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace marrow {

// A value inside a parsed document. Copies are cheap and keep the document alive. Accessors throw Error (ExitCode given
// to `parse`) naming file, path, the kind found and the kind wanted. Duplicate keys and trailing text are errors.
class Json {
 public:
  static Json parse(std::string_view text, const std::string& origin, ExitCode code = ExitCode::kBadInput);
  static Json read_file(const std::string& path, ExitCode code = ExitCode::kBadInput);

  bool is_array() const;
  bool is_string() const;
  bool is_number() const;
  bool is_null() const;

  bool has(std::string_view key) const;  // false also where this is no object
  Json at(std::string_view key) const;   // error if missing
  Json at(size_t index) const;
  size_t size() const;                 // of an object or array
  std::vector<Json> elements() const;  // of an array
  // Key and value of each member of an object, in the order of the keys.
  std::vector<std::pair<std::string, Json>> items() const;

  int64_t as_int() const;
  double as_double() const;  // integers too
  bool as_bool() const;
  std::string as_string() const;
  std::string dump() const;  // compact JSON text

  // at(key) converted; `fallback` where the key is missing or null.
  int64_t int_or(std::string_view key, int64_t fallback) const { return value_or(key, fallback, &Json::as_int); }
  double double_or(std::string_view key, double fallback) const { return value_or(key, fallback, &Json::as_double); }
  bool bool_or(std::string_view key, bool fallback) const { return value_or(key, fallback, &Json::as_bool); }
  std::string string_or(std::string_view key, const std::string& fallback) const {
    return value_or(key, fallback, &Json::as_string);
  }

  const std::string& origin() const;                 // the file it came from
  const std::string& path() const { return path_; }  // "" for the whole document
  // An Error about this value: "FILE: PATH: what".
  [[noreturn]] void fail(const std::string& what, const Fix& fix) const;

 private:
  struct Document;
  Json(std::shared_ptr<const Document> document, const void* node, std::string path)
      : document_(std::move(document)), node_(node), path_(std::move(path)) {}
  template <typename T>
  T value_or(std::string_view key, const T& fallback, T (Json::*as_value)() const) const {
    return has(key) && !at(key).is_null() ? (at(key).*as_value)() : fallback;
  }
  void expect(bool fits, const char* wanted) const;
  Json member(const std::string& key, const void* node) const;
  std::shared_ptr<const Document> document_;
  const void* node_;  // nlohmann node inside document_
  std::string path_;
};

// Shortest decimal text that reads back to the same double; "null" for NaN and infinities.
std::string json_number(double value);

// JSON text of a bool, a number, a string or a list of such.
template <typename T>
std::string json_text(const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return json_number(value);
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    return json_quote(value);
  } else {
    std::string list;
    for (const auto& item : value) list += (list.empty() ? "" : ", ") + json_text(item);
    return "[" + list + "]";
  }
}

// Writes JSON objects without a document: JsonWriter().field("a", 1, "b", "x").text().
class JsonWriter {
 public:
  template <typename T, typename... More>
  JsonWriter& field(std::string_view key, const T& value, const More&... more) {
    raw(key, json_text(value));
    if constexpr (sizeof...(more) > 0) field(more...);
    return *this;
  }
  JsonWriter& raw(std::string_view key, std::string_view json);  // `json` is already JSON
  std::string text() const { return "{" + joined(", ") + "}"; }
  // One field a line, as the Hub's own files have it.
  std::string lines() const { return "{\n  " + joined(",\n  ") + "\n}\n"; }

 private:
  std::string joined(std::string_view separator) const;
  std::vector<std::string> fields_;
};

}  // namespace marrow
