// GPT-OSS' config.json: what is refused. Values: tests/oracle/gpt_oss_oracle.py.
#include "models/config_changes.h"

namespace marrow {
namespace {

using test::changed;
using test::expect_refused;

Json published(const std::string& size) { return test::published("gpt-oss-" + size); }

TEST(GptOss, WhatItLacksIsRefusedByName) {
  const std::array<std::pair<const char*, const char*>, 31> cases{{
      {"hidden_act", "\"gelu\""},
      {"attention_dropout", "0.1"},
      {"swiglu_limit", "6.0"},
      {"experts_per_token", "2"},
      {"num_experts", "16"},
      {"partial_rotary_factor", "0.5"},
      {"quantization_config.quant_method", "\"fp8\""},
      {"quantization_config.quant_method", ""},
      {"num_local_experts", "513"},  // more than the router takes
      {"initial_context_length", "8192"},
      {"rope_scaling.rope_type", "\"longrope\""},
      {"rope_scaling.short_factor", "[1.0]"},
      {"rope_scaling.factor", "0.5"},
      {"rope_scaling.mscale", "-1"},
      {"rope_scaling.mscale_all_dim", "1e9"},
      {"rope_scaling.attention_factor", "0"},
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
  for (const auto& [path, value] : cases) expect_refused(published("20b"), path, value);
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
