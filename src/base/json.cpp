#include "base/json.h"

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files.h"

namespace marrow {
namespace {

// Members in file order. Appends without looking for an earlier one of equal key, which would make
// reading a vocabulary quadratic; DuplicateKeyCheck refuses such files.
template <class Key, class Value, class Less, class Allocator>
struct MemberList : nlohmann::ordered_map<Key, Value, Less, Allocator> {
  using nlohmann::ordered_map<Key, Value, Less, Allocator>::ordered_map;
  Value& operator[](const Key& key) { return this->emplace_back(key, Value()).second; }
};
using Node = nlohmann::basic_json<MemberList>;

const Node& as_node(const void* node) { return *static_cast<const Node*>(node); }

// Object keys seen so far at each open depth; a repeated key is refused, for two readers of such a
// file would disagree about its meaning.
class DuplicateKeyCheck {
 public:
  bool operator()(int, nlohmann::json::parse_event_t event, Node& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) open_.emplace_back();
    if (event == Event::object_end) open_.pop_back();
    if (event == Event::key && !open_.back().insert(value.get<std::string>()).second) {
      duplicate = value.get<std::string>();
    }
    return true;
  }
  std::string duplicate;

 private:
  std::vector<std::set<std::string>> open_;
};

}  // namespace

struct Json::Document {
  Node root;
  std::string origin;
  ExitCode code;
};

Json Json::parse(std::string_view text, const std::string& origin, ExitCode code) {
  auto document = std::make_shared<Document>();
  document->origin = origin;
  document->code = code;
  DuplicateKeyCheck check;
  try {
    document->root = Node::parse(text, std::ref(check));
  } catch (const nlohmann::json::exception& error) {
    MARROW_THROW(code, Fix("repair or regenerate this JSON file"), "{}: not valid JSON: {}", origin,
                 error.what());
  }
  MARROW_CHECK(check.duplicate.empty(), code, Fix("remove one of the two entries"),
               "{}: key {} appears twice in one object", origin, json_quote(check.duplicate));
  const void* root = &document->root;
  return Json(std::move(document), root, "");
}

Json Json::read_file(const std::string& path, ExitCode code) {
  return parse(read_text_file(path, code), path, code);
}

bool Json::is_object() const { return as_node(node_).is_object(); }
bool Json::is_array() const { return as_node(node_).is_array(); }
bool Json::is_string() const { return as_node(node_).is_string(); }
bool Json::is_number() const { return as_node(node_).is_number(); }
bool Json::is_integer() const { return as_node(node_).is_number_integer(); }
bool Json::is_bool() const { return as_node(node_).is_boolean(); }
bool Json::is_null() const { return as_node(node_).is_null(); }

bool Json::has(std::string_view key) const {
  return is_object() && as_node(node_).contains(std::string(key));
}

Json Json::at(std::string_view key) const {
  if (!is_object()) fail("expected an object", Fix("see the file format's documentation"));
  const auto found = as_node(node_).find(std::string(key));
  const std::string path = path_.empty() ? std::string(key) : path_ + "." + std::string(key);
  MARROW_CHECK(found != as_node(node_).end(), document_->code,
               Fix(fmt::format("add \"{}\" to {}", key, origin())), "{}: key {} is missing",
               origin(), path);
  return Json(document_, &*found, path);
}

Json Json::at(size_t index) const {
  if (!is_array()) fail("expected an array", Fix("see the file format's documentation"));
  if (index >= size()) {
    fail(fmt::format("index {} is past its {} elements", index, size()), Fix("repair the file"));
  }
  return Json(document_, &as_node(node_)[index], fmt::format("{}[{}]", path_, index));
}

size_t Json::size() const {
  if (!is_array() && !is_object()) {
    fail("expected an array or object", Fix("see the file format's documentation"));
  }
  return as_node(node_).size();
}

std::vector<std::string> Json::keys() const {
  if (!is_object()) fail("expected an object", Fix("see the file format's documentation"));
  std::vector<std::string> keys;
  for (const auto& item : as_node(node_).items()) keys.push_back(item.key());
  return keys;
}

std::vector<std::pair<std::string, Json>> Json::items() const {
  if (!is_object()) fail("expected an object", Fix("see the file format's documentation"));
  const std::string prefix = path_.empty() ? "" : path_ + ".";
  std::vector<std::pair<std::string, Json>> items;
  for (const auto& item : as_node(node_).items()) {
    items.emplace_back(item.key(), Json(document_, &item.value(), prefix + item.key()));
  }
  return items;
}

void Json::for_each(const std::function<void(const std::string&, const Json&)>& visit) const {
  if (!is_object()) fail("expected an object", Fix("see the file format's documentation"));
  for (const auto& item : as_node(node_).items()) {
    const std::string path = path_.empty() ? item.key() : path_ + "." + item.key();
    visit(item.key(), Json(document_, &item.value(), path));
  }
}

int64_t Json::as_int() const {
  const Node& node = as_node(node_);
  const bool too_large =
      node.is_number_unsigned() && node.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  if (!node.is_number_integer() || too_large) {
    fail(fmt::format("expected an integer, found {}", dump().substr(0, 60)), Fix("write an integer"));
  }
  return node.get<int64_t>();
}

double Json::as_double() const {
  if (!is_number()) {
    fail(fmt::format("expected a number, found {}", dump().substr(0, 60)), Fix("write a number"));
  }
  return as_node(node_).get<double>();
}

bool Json::as_bool() const {
  if (!is_bool()) {
    fail(fmt::format("expected true or false, found {}", dump().substr(0, 60)),
         Fix("write true or false"));
  }
  return as_node(node_).get<bool>();
}

std::string Json::as_string() const {
  if (!is_string()) {
    fail(fmt::format("expected a string, found {}", dump().substr(0, 60)), Fix("write a string"));
  }
  return as_node(node_).get<std::string>();
}

std::string Json::dump() const {
  return as_node(node_).dump(-1, ' ', false, Node::error_handler_t::replace);
}

int64_t Json::int_or(std::string_view key, int64_t fallback) const {
  return has(key) && !at(key).is_null() ? at(key).as_int() : fallback;
}
double Json::double_or(std::string_view key, double fallback) const {
  return has(key) && !at(key).is_null() ? at(key).as_double() : fallback;
}
bool Json::bool_or(std::string_view key, bool fallback) const {
  return has(key) && !at(key).is_null() ? at(key).as_bool() : fallback;
}
std::string Json::string_or(std::string_view key, const std::string& fallback) const {
  return has(key) && !at(key).is_null() ? at(key).as_string() : fallback;
}

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

JsonWriter& JsonWriter::raw(std::string_view key, std::string_view json) {
  if (!body_.empty()) body_ += ", ";
  body_ += json_quote(key);
  body_ += ": ";
  body_ += json;
  return *this;
}
JsonWriter& JsonWriter::field(std::string_view key, int64_t value) {
  return raw(key, fmt::format("{}", value));
}
JsonWriter& JsonWriter::field(std::string_view key, double value) {
  return raw(key, json_number(value));
}
JsonWriter& JsonWriter::field(std::string_view key, bool value) {
  return raw(key, value ? "true" : "false");
}
JsonWriter& JsonWriter::field(std::string_view key, std::string_view value) {
  return raw(key, json_quote(value));
}
JsonWriter& JsonWriter::field(std::string_view key, const std::vector<double>& values) {
  std::string list;
  for (const double value : values) list += (list.empty() ? "" : ", ") + json_number(value);
  return raw(key, "[" + list + "]");
}
JsonWriter& JsonWriter::field(std::string_view key, const std::vector<int64_t>& values) {
  std::string list;
  for (const int64_t value : values) list += fmt::format("{}{}", list.empty() ? "" : ", ", value);
  return raw(key, "[" + list + "]");
}

}  // namespace marrow
