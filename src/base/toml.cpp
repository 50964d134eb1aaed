#include "base/toml.h"

#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include <algorithm>

#include "base/json.h"

namespace marrow {
namespace {

std::string place(const std::string& origin, const toml::source_region& source) {
  return fmt::format("{}:{}:{}", origin, source.begin.line, source.begin.column);
}

TomlValue converted(const toml::node& node, const std::string& origin) {
  using Kind = TomlValue::Kind;
  TomlValue value;
  value.where = place(origin, node.source());
  if (const toml::table* table = node.as_table()) {
    for (const auto& [key, item] : *table) {
      value.items.push_back(converted(item, origin));
      value.items.back().key = std::string(key.str());
      value.items.back().key_where = place(origin, key.source());
    }
    // toml++ sorts by name; people expect faults to be reported in the order of the file.
    const auto line = [&](const TomlValue& item) {
      const auto begin = table->find(item.key)->first.source().begin;
      return std::pair(begin.line, begin.column);
    };
    std::stable_sort(value.items.begin(), value.items.end(),
                     [&](const auto& a, const auto& b) { return line(a) < line(b); });
  } else if (const toml::array* array = node.as_array()) {
    value.kind = Kind::kArray;
    for (const toml::node& item : *array) value.items.push_back(converted(item, origin));
  } else if (const auto* text = node.as_string()) {
    value.kind = Kind::kString;
    value.text = text->get();
  } else if (const auto* boolean = node.as_boolean()) {
    value.kind = Kind::kBool;
    value.boolean = boolean->get();
  } else if (const auto* integer = node.as_integer()) {
    value.kind = Kind::kInteger;
    value.integer = integer->get();
    value.real = static_cast<double>(value.integer);
  } else if (const auto* real = node.as_floating_point()) {
    value.kind = Kind::kReal;
    value.real = real->get();
  } else {
    value.kind = Kind::kTime;
  }
  return value;
}

void place_all(TomlValue& value, const std::string& where) {
  value.where = value.key_where = where;
  for (TomlValue& item : value.items) place_all(item, where);
}

TomlValue parse_override(const std::string& text) {
  try {
    TomlValue parsed = converted(toml::parse("value = " + text), "");
    // "1\nother = 2" would be TOML too, but not one value.
    if (parsed.items.size() == 1) return std::move(parsed.items.front());
  } catch (const toml::parse_error&) {
    // A bare word: falls through.
  }
  TomlValue word;
  word.kind = TomlValue::Kind::kString;
  word.text = text;
  return word;
}

}  // namespace

const TomlValue* TomlValue::find(std::string_view wanted) const {
  for (const TomlValue& item : items) {
    if (kind == Kind::kTable && item.key == wanted) return &item;
  }
  return nullptr;
}

std::string TomlValue::describe() const {
  switch (kind) {
    case Kind::kBool:
      return boolean ? "true" : "false";
    case Kind::kInteger:
      return fmt::format("the integer {}", integer);
    case Kind::kReal:
      return fmt::format("the number {}", real);
    case Kind::kString:
      return "the string " + json_quote(text);
    case Kind::kArray:
      return fmt::format("a list of {}", items.size());
    case Kind::kTable:
      return "a table";
    case Kind::kTime:
      return "a date or time";
  }
  return "";
}

TomlValue parse_toml(std::string_view text, const std::string& origin) {
  try {
    return converted(toml::parse(text), origin);
  } catch (const toml::parse_error& error) {
    MARROW_THROW(ExitCode::kUsage, Fix("repair the TOML at that line"), "{}: not valid TOML: {}",
                 place(origin, error.source()), error.description());
  }
}

void override_toml(TomlValue& root, const std::string& assignment) {
  const size_t equals = assignment.find('=');
  MARROW_CHECK(equals != std::string::npos && equals > 0 && equals + 1 < assignment.size(),
               ExitCode::kUsage, Fix("write --set SECTION.KEY=VALUE, as in --set train.steps=10"),
               "--set {} is no assignment", json_quote(assignment));
  std::string path = assignment.substr(0, equals);
  path.erase(path.find_last_not_of(' ') + 1);
  const std::string where = "--set " + path;
  TomlValue* at = &root;
  for (size_t start = 0; start <= path.size();) {
    const size_t end = std::min(path.find('.', start), path.size());
    const std::string key = path.substr(start, end - start);
    MARROW_CHECK(at->kind == TomlValue::Kind::kTable, ExitCode::kUsage,
                 Fix("write --set SECTION.KEY=VALUE"), "{}: {} is no section but {}", where,
                 json_quote(path.substr(0, start == 0 ? 0 : start - 1)), at->describe());
    if (at->find(key) == nullptr) {
      at->items.emplace_back().key = key;
      at->items.back().where = at->items.back().key_where = where;
    }
    at = const_cast<TomlValue*>(at->find(key));
    start = end + 1;
  }
  const std::string key = at->key;
  *at = parse_override(assignment.substr(equals + 1));
  place_all(*at, where);
  at->key = key;
}

std::string toml_quote(std::string_view text) {
  std::string out;
  for (const char c : json_quote(text)) {
    if (c == '\x7f') {
      out += "\\u007F";  // a control character to TOML, not to JSON
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace marrow
