// TOML as a plain tree in which every key and value knows its place.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace marrow {

struct TomlValue {
  enum class Kind { kBool, kInteger, kReal, kString, kArray, kTable, kTime };
  Kind kind = Kind::kTable;
  std::string key;        // inside a table; "" for an array's element
  std::string key_where;  // "run.toml:3:1", or "--set train.steps"
  std::string where;      // of the value: "run.toml:3:9"
  bool boolean = false;
  int64_t integer = 0;
  double real = 0.0;  // of an integer too
  std::string text;
  std::vector<TomlValue> items;  // of an array or a table, in file order of a table's keys

  const TomlValue* find(std::string_view key) const;  // nullptr where a table has no such key
  std::string describe() const;                       // "the string \"x\"": for error texts
};

// Faults of the text (also a repeated key) are Errors with kUsage: "ORIGIN:LINE:COLUMN: what".
TomlValue parse_toml(std::string_view text, const std::string& origin);

// Applies "train.steps=10" on top of `root`. The value is TOML; what is no TOML is a string, so
// that --set model.config=a/b.json needs no quotes.
void override_toml(TomlValue& root, const std::string& assignment);

// A TOML basic string, quotes included.
std::string toml_quote(std::string_view text);

}  // namespace marrow
