// GPT-OSS' config.json: the published models, and what is refused. Values: tests/oracle/gpt_oss_oracle.py.
#include "models/model_contract.h"

#include <gtest/gtest.h>

namespace marrow {
namespace {

Json published(const std::string& size) {
  return Json::read_file(fmt::format("{}/configs/models/gpt-oss-{}.json", MARROW_SOURCE_DIR, size), ExitCode::kUsage);
}

// All parameters, and those that a token meets: of the experts, k in E; of the embedding none, which is looked up.
std::pair<int64_t, int64_t> parameters(const MoeModel& model) {
  int64_t total = 0, active = 0;
  for (const ParameterSpec& spec : all_parameter_specs(model)) {
    int64_t elements = 0;
    for (const HubTensor& part : spec.parts) elements += part.elements();
    total += elements;
    if (spec.name == "embedding") continue;
    active += spec.expert ? elements / model.shape().experts * model.shape().top_k : elements;
  }
  return {total, active};
}

TEST(GptOss, PublishedModelsHaveTheirParameters) {
  // The model card says 20.9B and 3.6B, 116.8B and 5.1B.
  EXPECT_EQ(parameters(*open_model(published("20b"))), std::pair(int64_t{20914757184}, int64_t{3608307264}));
  EXPECT_EQ(parameters(*open_model(published("120b"))), std::pair(int64_t{116829156672}, int64_t{5132849472}));
}

// `config` with one field of it, or of one of its objects, changed: JSON text; "": removed.
Json changed(const Json& config, const std::string& path, const std::string& value) {
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

TEST(GptOss, WhatItLacksIsRefusedByName) {
  const std::array<std::pair<const char*, const char*>, 26> cases{{
      {"hidden_act", "\"gelu\""},
      {"attention_dropout", "0.1"},
      {"swiglu_limit", "6.0"},
      {"experts_per_token", "2"},
      {"num_experts", "16"},
      {"partial_rotary_factor", "0.5"},
      {"quantization_config.quant_method", "\"fp8\""},
      {"initial_context_length", "8192"},
      {"rope_scaling.rope_type", "\"longrope\""},
      {"rope_scaling.short_factor", "[1.0]"},
      {"rope_scaling.factor", "0.5"},
      {"rope_scaling.original_max_position_embeddings", "0"},
      {"rope_parameters", "{\"factor\": 16.0}"},
      {"rope_parameters", "{\"rope_theta\": 1e4}"},
      {"layer_types", "[\"full_attention\"]"},
      {"sliding_window", "null"},
      {"sliding_window", "0"},
      {"num_key_value_heads", "7"},
      {"head_dim", "63"},
      {"rms_norm_eps", "0"},
      {"vocab_size", ""},
      {"rope_theta", ""},
      {"rope_scaling", ""},
      {"layer_types", ""},
      {"head_dim", ""},
      {"attention_bias", ""},
  }};
  for (const auto& [path, value] : cases) {
    try {
      open_model(changed(published("20b"), path, value));
      ADD_FAILURE() << path << " = " << value << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kUsage);
      EXPECT_FALSE(error.report().fix.empty());
      const std::string_view name(path);
      const std::string key(name.substr(name.rfind('.') + 1));
      const bool rope = key.starts_with("rope_");
      const std::string what = error.report().what;
      EXPECT_NE(what.find(rope ? key.substr(0, 4) : key), std::string::npos) << key << ": " << what;
    }
  }
  std::string types = R"("chunked_attention")";
  for (int i = 1; i < 24; ++i) types += R"(, "full_attention")";
  EXPECT_THROW(open_model(changed(published("20b"), "layer_types", "[" + types + "]")), Error);
}

// A layer of a window costs what its rows see.
TEST(GptOss, WindowsCountInTheOperations) {
  const auto model = open_model(published("20b"));
  const double q = 64 * 64, layers = 12;
  const double difference = model->forward_flops_per_token(4096) - model->forward_flops_per_token(128);
  // Full layers: 2 · q · length; windows of 128: 128 keys less the first rows' lack.
  const double windows = 4 * q * 128 * (0.5 - 128 / 8192.0);
  EXPECT_NEAR(difference, layers * (2 * q * (4096 - 128) + windows), 1);
}

}  // namespace
}  // namespace marrow
