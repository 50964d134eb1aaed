#include "base/json.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files.h"

namespace marrow {
namespace {

using Node = nlohmann::json;

constexpr int kDeepest = 200;  // levels of nesting; no file of the Hub comes near

const Node& as_node(const void* node) { return *static_cast<const Node*>(node); }

}  // namespace

struct Json::Document {
  Node root;
  std::string origin;
  ExitCode code;
};

Json Json::parse(std::string_view text, const std::string& origin, ExitCode code) {
  using Event = nlohmann::json::parse_event_t;
  auto document = std::make_shared<Document>(Document{{}, origin, code});
  // Two readers of a file with a repeated key would disagree about its meaning.
  std::vector<std::set<std::string>> open;  // keys seen so far in each open object
  std::string repeated;
  bool too_deep = false;
  const auto note_key = [&](int depth, Event event, Node& value) {
    if (depth > kDeepest) too_deep = true;
    if (too_deep) return false;  // drops what lies deeper: printing and destroying recurse
    if (event == Event::object_start) open.emplace_back();
    if (event == Event::object_end) open.pop_back();
    if (event == Event::key && !open.back().insert(value.get<std::string>()).second) {
      repeated = value.get<std::string>();
    }
    return true;
  };
  // To the library a zero byte is the end, whatever follows.
  const std::string_view before = text.substr(0, text.find('\0'));
  MARROW_CHECK(before.size() == text.size(), code, Fix("repair or regenerate this JSON file"),
               "{}: not valid JSON: at line {}, column {}: a zero byte", origin,
               1 + std::count(before.begin(), before.end(), '\n'), before.size() - before.rfind('\n'));
  try {
    document->root = Node::parse(text, note_key);
  } catch (const nlohmann::json::exception& error) {
    MARROW_THROW(code, Fix("repair or regenerate this JSON file"), "{}: not valid JSON: {}", origin, error.what());
  }
  MARROW_CHECK(!too_deep, code, Fix("repair or regenerate this JSON file"), "{}: nested more than {} levels deep",
               origin, kDeepest);
  MARROW_CHECK(repeated.empty(), code, Fix("remove one of the two entries"), "{}: key {} appears twice in one object",
               origin, json_quote(repeated));
  const void* root = &document->root;
  return Json(std::move(document), root, "");
}

Json Json::read_file(const std::string& path, ExitCode code) { return parse(read_text_file(path, code), path, code); }

void Json::expect(bool fits, const char* wanted) const {
  if (!fits) fail(fmt::format("expected {}, found {}", wanted, dump().substr(0, 60)), Fix("write {}", wanted));
}

bool Json::is_array() const { return as_node(node_).is_array(); }
bool Json::is_string() const { return as_node(node_).is_string(); }
bool Json::is_number() const { return as_node(node_).is_number(); }
bool Json::is_null() const { return as_node(node_).is_null(); }

bool Json::has(std::string_view key) const {
  return as_node(node_).is_object() && as_node(node_).contains(std::string(key));
}

Json Json::member(const std::string& key, const void* node) const {
  return Json(document_, node, path_.empty() ? key : path_ + "." + key);
}

Json Json::at(std::string_view key) const {
  expect(as_node(node_).is_object(), "an object");
  const auto found = as_node(node_).find(std::string(key));
  if (found == as_node(node_).end()) {
    member(std::string(key), node_).fail("this key is missing", Fix("add \"{}\" to {}", key, origin()));
  }
  return member(std::string(key), &*found);
}

Json Json::at(size_t index) const {
  expect(is_array(), "a list");
  if (index >= size()) fail(fmt::format("it has only {} elements", size()), Fix("add the others"));
  return Json(document_, &as_node(node_)[index], fmt::format("{}[{}]", path_, index));
}

size_t Json::size() const {
  expect(is_array() || as_node(node_).is_object(), "a list or an object");
  return as_node(node_).size();
}

std::vector<Json> Json::elements() const {
  expect(is_array(), "a list");
  std::vector<Json> elements;
  for (size_t i = 0; i < size(); ++i) elements.push_back(at(i));
  return elements;
}

std::vector<std::pair<std::string, Json>> Json::items() const {
  expect(as_node(node_).is_object(), "an object");
  std::vector<std::pair<std::string, Json>> items;
  for (const auto& item : as_node(node_).items()) {
    items.emplace_back(item.key(), member(item.key(), &item.value()));
  }
  return items;
}

int64_t Json::as_int() const {
  const Node& node = as_node(node_);
  const bool too_large = node.is_number_unsigned() && node.get<uint64_t>() > uint64_t{INT64_MAX};
  expect(node.is_number_integer() && !too_large, "an integer");
  return node.get<int64_t>();
}

double Json::as_double() const {
  expect(is_number(), "a number");
  return as_node(node_).get<double>();
}

bool Json::as_bool() const {
  expect(as_node(node_).is_boolean(), "true or false");
  return as_node(node_).get<bool>();
}

std::string Json::as_string() const {
  expect(is_string(), "a string");
  return as_node(node_).get<std::string>();
}

std::string Json::dump() const { return as_node(node_).dump(-1, ' ', false, Node::error_handler_t::replace); }

const std::string& Json::origin() const { return document_->origin; }

void Json::fail(const std::string& what, const Fix& fix) const {
  MARROW_THROW(document_->code, fix, "{}: {}{}{}", origin(), path_, path_.empty() ? "" : ": ", what);
}

std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  return std::string(buffer, end);
}

std::string json_quote(std::string_view text) {
  return Node(text).dump(-1, ' ', false, Node::error_handler_t::replace);
}

JsonWriter& JsonWriter::raw(std::string_view key, std::string_view json) {
  fields_.push_back(json_quote(key).append(": ").append(json));
  return *this;
}

std::string JsonWriter::joined(std::string_view separator) const {
  return fmt::format("{}", fmt::join(fields_, separator));
}

}  // namespace marrow
