// Json::parse, every accessor, and text written back.
#include "fuzz/fuzz_target.h"

using namespace marrow::fuzz;  // NOLINT

namespace marrow {
namespace {

void visit(const Json& json) {
  accepts([&] { json.as_int(); });
  accepts([&] { json.as_double(); });
  accepts([&] { json.as_bool(); });
  accepts([&] { require(json_quote(json.as_string()) == json.dump(), "a string is quoted alike"); });
  accepts([&] { json.at("key"); });
  accepts([&] { json.at(json.size()); });
  accepts([&] {
    for (const Json& element : json.elements()) visit(element);
  });
  accepts([&] {
    for (const auto& [key, value] : json.items()) {
      require(json.has(key) && json.at(key).dump() == value.dump(), "a member is found by its key");
      visit(value);
    }
  });
}

}  // namespace
}  // namespace marrow

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using marrow::Json;
  accepts([&] {
    const Json json = Json::parse(text_of(data, size), "the input");
    require(text_of(data, size).find('\0') == std::string_view::npos, "JSON has no zero byte");
    require(Json::parse(json.dump(), "its dump").dump() == json.dump(), "a dump reads back to the same value");
    marrow::visit(json);
  });
  return 0;
}
