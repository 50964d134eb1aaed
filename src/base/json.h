// Reading JSON with errors that name the file and the path of the value ("model.vocab").
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"

namespace marrow {

// A value inside a parsed document. Copies are cheap and keep the document alive. Every accessor
// throws Error (ExitCode given to `parse`) that names file, path, the kind found and the kind
// wanted. Duplicate keys and trailing text are errors.
class Json {
 public:
  static Json parse(std::string_view text, const std::string& origin,
                    ExitCode code = ExitCode::kBadInput);
  static Json read_file(const std::string& path, ExitCode code = ExitCode::kBadInput);

  bool is_object() const;
  bool is_array() const;
  bool is_string() const;
  bool is_number() const;
  bool is_integer() const;
  bool is_bool() const;
  bool is_null() const;

  bool has(std::string_view key) const;         // false also where this is no object
  Json at(std::string_view key) const;          // error if missing
  Json at(size_t index) const;
  size_t size() const;                          // of an object or array
  std::vector<std::string> keys() const;        // in file order
  // Calls visit(key, value) for every member in file order: for objects of 100,000 members, where
  // at(key), which searches, would be quadratic.
  void for_each(const std::function<void(const std::string&, const Json&)>& visit) const;
  // Key and value of each entry of an object, in file order; at() searches from the start.
  std::vector<std::pair<std::string, Json>> items() const;

  int64_t as_int() const;
  double as_double() const;  // integers too
  bool as_bool() const;
  std::string as_string() const;
  std::string dump() const;  // compact JSON text

  // at(key) converted; `fallback` where the key is missing or null.
  int64_t int_or(std::string_view key, int64_t fallback) const;
  double double_or(std::string_view key, double fallback) const;
  bool bool_or(std::string_view key, bool fallback) const;
  std::string string_or(std::string_view key, const std::string& fallback) const;

  const std::string& origin() const;              // the file it came from
  const std::string& path() const { return path_; }  // "" for the whole document
  // An Error about this value: "FILE: PATH: what".
  [[noreturn]] void fail(const std::string& what, const Fix& fix) const;

 private:
  struct Document;
  Json(std::shared_ptr<const Document> document, const void* node, std::string path)
      : document_(std::move(document)), node_(node), path_(std::move(path)) {}
  std::shared_ptr<const Document> document_;
  const void* node_;  // nlohmann node inside document_
  std::string path_;
};

// Writes JSON objects without a document: JsonWriter().field("a", 1).field("b", "x").text().
// Doubles print so that they read back to the same bits; NaN and infinities become null.
class JsonWriter {
 public:
  JsonWriter& field(std::string_view key, int64_t value);
  JsonWriter& field(std::string_view key, int value) { return field(key, int64_t{value}); }
  JsonWriter& field(std::string_view key, double value);
  JsonWriter& field(std::string_view key, bool value);
  JsonWriter& field(std::string_view key, std::string_view value);
  JsonWriter& field(std::string_view key, const char* value) {
    return field(key, std::string_view(value));
  }
  JsonWriter& field(std::string_view key, const std::vector<double>& values);
  JsonWriter& field(std::string_view key, const std::vector<int64_t>& values);
  JsonWriter& raw(std::string_view key, std::string_view json);  // `json` is already JSON
  std::string text() const { return "{" + body_ + "}"; }

 private:
  std::string body_;
};

// Shortest decimal text that reads back to the same double; "null" for NaN and infinities.
std::string json_number(double value);

}  // namespace marrow
