// Published configs with something changed, and that a family refuses it by name.
#pragma once
#include <gtest/gtest.h>

#include "models/model_contract.h"

namespace marrow::test {

inline Json published(const std::string& name) {
  return Json::read_file(fmt::format("{}/configs/models/{}.json", MARROW_SOURCE_DIR, name), ExitCode::kUsage);
}

// `config` with one field of it, or of one of its objects, changed: JSON text; "": removed.
inline Json changed(const Json& config, const std::string& path, const std::string& value) {
  const size_t dot = path.find('.');
  const std::string key = path.substr(0, dot);
  JsonWriter out;
  for (const auto& [name, field] : config.items()) {
    if (name != key) out.raw(name, field.dump());
  }
  if (dot != std::string::npos) {
    out.raw(key, changed(config.at(key), path.substr(dot + 1), value).dump());
  } else if (!value.empty()) {
    out.raw(key, value);
  }
  return Json::parse(out.text(), "config.json", ExitCode::kUsage);
}

inline void expect_refused(const Json& config, const std::string& path, const std::string& value) {
  try {
    open_model(changed(config, path, value));
    ADD_FAILURE() << path << " = " << value << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.report().code, ExitCode::kUsage);
    EXPECT_FALSE(error.report().fix.empty());
    const std::string key(path.substr(path.rfind('.') + 1)), what = error.report().what;
    EXPECT_NE(what.find(key.starts_with("rope_") ? "rope" : key), std::string::npos) << key << ": " << what;
  }
}

}  // namespace marrow::test
