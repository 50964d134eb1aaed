#include <gtest/gtest.h>

#include <filesystem>

#include "models/config_changes.h"
#include "models/families.h"

namespace marrow {
namespace {

Json published(const std::string& name) {
  return Json::read_file(std::string(MARROW_SOURCE_DIR) + "/configs/models/" + name + ".json", ExitCode::kUsage);
}

// The published config of V2-Lite with `text` in place of `original`.
Json changed(const std::string& original, const std::string& text, const std::string& name = "deepseek-v2-lite") {
  std::string config = published(name).dump();
  const size_t at = config.find(original);
  MARROW_CHECK(at != std::string::npos, ExitCode::kUsage, Fix("see the config"), "{} holds no {}", name, original);
  return Json::parse(config.replace(at, original.size(), text), "config.json", ExitCode::kUsage);
}

int64_t elements_of(const std::vector<ParameterSpec>& specs) {
  int64_t elements = 0;
  for (const ParameterSpec& spec : specs) {
    for (const HubTensor& part : spec.parts) elements += part.elements();
  }
  return elements;
}

int64_t elements_of(const std::vector<HubTensor>& tensors) {
  int64_t elements = 0;
  for (const HubTensor& tensor : tensors) elements += tensor.elements();
  return elements;
}

TEST(DeepseekV2, PublishedParameterCounts) {
  const auto lite = open_model(published("deepseek-v2-lite")), moonlight = open_model(published("moonlight-16b-a3b"));
  EXPECT_EQ(elements_of(all_hub_tensors(*lite)), 15'706'484'224);
  EXPECT_EQ(elements_of(lite->layer_specs(0)), 81'007'104);
  EXPECT_EQ(elements_of(lite->layer_specs(1)), 584'847'872);
  EXPECT_EQ(elements_of(lite->embedding_specs()) + elements_of(lite->head_specs()), 419'430'400 + 2'048);
  EXPECT_EQ(elements_of(all_hub_tensors(*moonlight)), 15'960'110'208);
  // Of 64 experts a token uses 6.
  const int64_t idle = int64_t{26} * (64 - 6) * 3 * 2048 * 1408;
  EXPECT_EQ(elements_of(all_hub_tensors(*lite)) - idle, 2'661'150'208);
  EXPECT_EQ(elements_of(all_hub_tensors(*moonlight)) - idle, 2'914'776'192);
  // Forward products: two operations for each active element but those of the embedding and the norms, and scores.
  const double flops = lite->forward_flops_per_token(4096), scores = 27.0 * 16 * (192 + 128) * 4096;
  const double norms = 27 * (2 * 2048 + 512) + 2048;
  EXPECT_NEAR(flops, 2 * (2'661'150'208 - 102400 * 2048 - norms) + scores, 1e-9 * flops);
}

TEST(DeepseekV2, SelectionBiasesBelongToV3) {
  EXPECT_TRUE(open_model(published("deepseek-v2-lite"))->shape().selection_biases.empty());
  const ModelShape shape = open_model(published("moonlight-16b-a3b"))->shape();
  ASSERT_EQ(shape.selection_biases.size(), 26u);
  EXPECT_EQ(shape.selection_biases[0].name, "model.layers.1.mlp.gate.e_score_correction_bias");
  EXPECT_EQ(shape.moe_layers(), 26);
}

// Case A1.
TEST(DeepseekV2, YarnCorrectionsAreTwo) {
  struct Row {
    std::string mscale, all_dim;
    double table, softmax, scale;
  };
  const Row rows[] = {{"0.707", "0.707", 1.0, 1.589626, 0.1147214},
                      {"1", "0.707", 1.085726, 1.589626, 0.1147214},
                      {"0.707", "1", 0.921042, 1.873854, 0.1352338},
                      {"1", "0", 1.368888, 1.0, 0.0721688}};
  for (const Row& row : rows) {
    const DeepseekRope rope =
        read_deepseek_rope(changed("\"mscale\":0.707,\"mscale_all_dim\":0.707",
                                   fmt::format("\"mscale\":{},\"mscale_all_dim\":{}", row.mscale, row.all_dim)));
    EXPECT_NEAR(rope.table_scale, row.table, 5e-7);
    EXPECT_NEAR(rope.softmax_scale, row.softmax, 5e-7);
    EXPECT_NEAR(rope.softmax_scale / std::sqrt(192.0), row.scale, 5e-8);
    ASSERT_EQ(rope.frequencies.size(), 32u);
    EXPECT_NEAR(rope.frequencies[10], 0.0562341, 5e-8);
    EXPECT_NEAR(rope.frequencies[16], 0.00550000, 5e-9);
    EXPECT_NEAR(rope.frequencies[23], 3.33380e-5, 5e-10);
  }
}

TEST(DeepseekV2, NoScalingIsPlainRope) {
  const DeepseekRope rope = read_deepseek_rope(published("moonlight-16b-a3b"));
  EXPECT_EQ(rope.table_scale, 1.0);
  EXPECT_EQ(rope.softmax_scale, 1.0);
  EXPECT_NEAR(rope.frequencies[1], std::pow(50000.0, -2.0 / 64.0), 1e-12);
}

TEST(DeepseekV2, BothStylesOfRopeAreOne) {
  const std::string old_style = R"("rope_scaling":{"beta_fast":32,"beta_slow":1,"factor":40,"mscale":0.707,)"
                                R"("mscale_all_dim":0.707,"original_max_position_embeddings":4096,"type":"yarn"},)"
                                R"("rope_theta":10000)";
  const std::string current = R"("rope_parameters":{"beta_fast":32,"beta_slow":1,"factor":40,"mscale":0.707,)"
                              R"("mscale_all_dim":0.707,"original_max_position_embeddings":4096,"rope_type":"yarn",)"
                              R"("rope_theta":10000})";
  const DeepseekRope a = read_deepseek_rope(published("deepseek-v2-lite"));
  const DeepseekRope b = read_deepseek_rope(changed(old_style, current));
  const DeepseekRope both = read_deepseek_rope(changed(old_style, old_style + "," + current));
  EXPECT_EQ(a.frequencies, b.frequencies);
  EXPECT_EQ(a.frequencies, both.frequencies);
  EXPECT_EQ(a.softmax_scale, b.softmax_scale);
  EXPECT_THROW(read_deepseek_rope(changed(old_style, "\"a\":1")), Error);  // no theta is no default
}

TEST(DeepseekV2, WhatIsNotSupportedIsNamed) {
  struct Change {
    std::string original, text, named;
    const char* model = "deepseek-v2-lite";
  };
  const Change changes[] = {
      {"\"attention_bias\":false", "\"attention_bias\":true", "attention_bias"},
      {"\"attention_dropout\":0.0", "\"attention_dropout\":0.1", "attention_dropout"},
      {"\"silu\"", "\"gelu\"", "hidden_act"},
      {"\"moe_layer_freq\":1", "\"moe_layer_freq\":2", "moe_layer_freq"},
      {"\"use_cache\":true", "\"mlp_bias\":true", "mlp_bias"},
      {"\"use_cache\":true", "\"quantization_config\":{}", "quantization_config"},
      {"\"use_cache\":true", "\"head_dim\":128", "head_dim"},
      {"\"use_cache\":true", "\"qk_head_dim\":128", "qk_head_dim"},
      {"\"norm_topk_prob\":false", "\"norm_topk_prob\":true", "norm_topk_prob"},
      {"\"softmax\"", "\"sigmoid\"", "scoring_func"},
      {"\"greedy\"", "\"noaux_tc\"", "topk_method"},
      {"\"topk_method\":\"greedy\",", "", "topk_method"},
      {"\"q_lora_rank\":null,", "", "q_lora_rank"},
      {"\"num_key_value_heads\":16", "\"num_key_value_heads\":4", "num_key_value_heads"},
      {"\"first_k_dense_replace\":1", "\"first_k_dense_replace\":27", "first_k_dense_replace"},
      {"\"num_experts_per_tok\":6", "\"num_experts_per_tok\":65", "num_experts_per_tok"},
      {"\"v_head_dim\":128", "\"v_head_dim\":127", "v_head_dim"},
      {"\"routed_scaling_factor\":1.0", "\"routed_scaling_factor\":-1", "routed_scaling_factor"},
      {"\"type\":\"yarn\"", "\"type\":\"linear\"", "type"},
      {"\"beta_slow\":1", "\"truncate\":false", "truncate"},
      {"\"beta_slow\":1", "\"attention_factor\":1.0", "attention_factor"},
      {"\"factor\":40,", "", "factor"},
      {"\"mscale\":0.707,", "", "mscale"},
      {"\"mscale\":0.707,", "\"mscale\":1e300,", "mscale"},
      {"\"noaux_tc\"", "\"greedy\"", "topk_method", "moonlight-16b-a3b"},
      {"\"use_cache\":true", "\"rope_interleave\":false", "rope_interleave", "moonlight-16b-a3b"},
      {"\"n_group\":1", "\"n_group\":7", "n_group", "moonlight-16b-a3b"},
      {"\"topk_group\":1", "\"topk_group\":2", "topk_group", "moonlight-16b-a3b"},
  };
  for (const Change& change : changes) {
    SCOPED_TRACE(change.text + change.original);
    try {
      open_model(changed(change.original, change.text, change.model));
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_NE(error.report().what.find(change.named), std::string::npos) << error.report().what;
      EXPECT_EQ(error.report().code, ExitCode::kUsage);
    }
  }
}

// What the router's kernel does not take.
TEST(DeepseekV2, RefusesWhatTheRouterCannot) {
  const Json v3 = test::published("moonlight-16b-a3b");
  test::expect_refused(test::changed(v3, "n_routed_experts", "32"), "n_group", "32");  // one expert a group
  test::expect_refused(v3, "n_routed_experts", "513");
  test::expect_refused(v3, "num_experts_per_tok", "33");
  test::expect_refused(v3, "partial_rotary_factor", "0.5");
  test::expect_refused(v3, "num_attention_heads", "\"16\"");
}

}  // namespace
}  // namespace marrow
