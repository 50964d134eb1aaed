// Qwen3.5-MoE's config.json: what is read and what is refused. Values: tests/oracle/qwen3_5_oracle.py.
#include "models/config_changes.h"

namespace marrow {
namespace {

using test::changed;
using test::expect_refused;

Json published() { return test::published("qwen3.5-35b-a3b"); }

TEST(Qwen35Moe, WhatItLacksIsRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {"hidden_act", "\"gelu\""},
      {"attention_bias", "true"},
      {"attention_dropout", "0.1"},
      {"attn_output_gate", "false"},
      {"norm_topk_prob", "false"},
      {"decoder_sparse_step", "2"},
      {"mlp_only_layers", "[0]"},
      {"mamba_ssm_dtype", "\"bfloat16\""},
      {"rope_scaling", "{\"factor\": 2.0}"},
      {"quantization_config", "{\"quant_method\": \"fp8\"}"},
      {"rope_parameters.rope_type", "\"yarn\""},
      {"rope_parameters.factor", "4.0"},
      {"rope_parameters.rope_theta", ""},
      {"rope_parameters.partial_rotary_factor", ""},
      {"rope_parameters.partial_rotary_factor", "0.0"},
      {"rope_parameters.partial_rotary_factor", "0.02"},  // 5 of 256 elements
      {"rope_theta", "1e4"},
      {"layer_types", "[\"full_attention\"]"},
      {"full_attention_interval", ""},
      {"linear_conv_kernel_dim", "5"},
      {"linear_num_key_heads", "5"},
      {"num_key_value_heads", "3"},
      {"num_local_experts", "8"},
      {"num_experts_per_tok", "33"},
      {"num_experts", "513"},
      {"rms_norm_eps", "0"},
      {"head_dim", ""},
      {"vocab_size", ""},
      {"shared_expert_intermediate_size", ""},
  };
  for (const auto& [path, value] : cases) expect_refused(published(), path, value);
  std::string types = R"("sliding_attention")";
  for (int i = 1; i < 40; ++i) types += R"(, "full_attention")";
  EXPECT_THROW(open_model(changed(published(), "layer_types", "[" + types + "]")), Error);
}

// The language model of one of text and images, and where the two disagree.
TEST(Qwen35Moe, ReadsTheTextConfig) {
  const auto whole = [](const std::string& text, const std::string& more) {
    return Json::parse(fmt::format(R"({{"model_type": "qwen3_5_moe", "text_config": {}{}}})", text, more),
                       "config.json", ExitCode::kUsage);
  };
  const std::string text = published().dump();
  EXPECT_FALSE(open_model(whole(text, R"(, "vision_config": {"depth": 1})"))->shape().tied_embeddings);
  EXPECT_THROW(open_model(whole(text, R"(, "tie_word_embeddings": true)")), Error);
  const std::string silent = changed(published(), "tie_word_embeddings", "").dump();
  EXPECT_TRUE(open_model(whole(silent, R"(, "tie_word_embeddings": true)"))->shape().tied_embeddings);
  EXPECT_THROW(open_model(whole(changed(published(), "model_type", "\"qwen3_moe\"").dump(), "")), Error);
  EXPECT_THROW(open_model(Json::parse(R"({"model_type": "qwen3_5_moe"})", "config.json", ExitCode::kUsage)), Error);
}

// Every fourth layer attends, and costs what its rows see; the others cost the same at any length.
TEST(Qwen35Moe, LayersAlternate) {
  const auto model = open_model(published());
  const auto has = [&](int64_t layer, const char* name) {
    return std::ranges::any_of(model->layer_specs(layer), [&](const ParameterSpec& spec) {
      return spec.name == fmt::format("layers.{}.{}", layer, name);
    });
  };
  for (int64_t layer = 0; layer < 40; ++layer) {
    EXPECT_EQ(has(layer, "q_norm"), layer % 4 == 3);
    EXPECT_EQ(has(layer, "a_log"), layer % 4 != 3);
  }
  EXPECT_EQ(model->forward_flops_per_token(5096) - model->forward_flops_per_token(4096), 10 * 2.0 * 16 * 256 * 1000);
  // Two operations for each active element but those of norms, convolutions and decays, and those of the states.
  const double active = 2'946'429'568, vectors = 40 * 2 * 2048 + 2048 + 10 * 2 * 256 + 30 * (8192 * 4 + 2 * 32 + 128);
  EXPECT_NEAR(model->forward_flops_per_token(4096),
              2 * (active - vectors) + 10 * 2.0 * 4096 * 4096 + 30 * 6.0 * 32 * 128 * 128, 1);
}

// Weight decay acts on what products are made of.
TEST(Qwen35Moe, DecayIsForMatrices) {
  for (const ParameterSpec& spec : all_parameter_specs(*open_model(published()))) {
    const bool kept = spec.shape.size() == 1 || spec.name.ends_with("convolution");
    EXPECT_EQ(spec.decay, !kept) << spec.name;
    EXPECT_TRUE(!kept || spec.rule == UpdateRule::kAdamW) << spec.name;
  }
}

}  // namespace
}  // namespace marrow
