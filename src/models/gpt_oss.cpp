// GPT-OSS: grouped-query attention with learned sinks, on some layers within a sliding window; YaRN; softmax over the
// chosen experts' logits; clamped SwiGLU experts; biases everywhere but in embedding, head and norms.
#include "models/config_fields.h"
#include "models/families.h"
#include "models/family_specs.h"
#include "models/layer_operators.h"
#include "ops/expert_bias.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/qk_norm_rope.h"
#include "ops/rms_norm.h"
#include "ops/rows.h"
#include "ops/swiglu.h"

namespace marrow {
namespace {

constexpr double kSwigluAlpha = 1.702, kSwigluLimit = 7.0;

struct GptOssConfig {
  ModelShape shape;
  int64_t heads = 0;             // Hq
  int64_t kv_heads = 0;          // Hkv
  int64_t head_size = 0;         // D
  int64_t intermediate = 0;      // I, of one expert
  bool attention_bias = true;    // of q, k, v and o
  std::vector<int64_t> windows;  // of each layer: keys a row sees; 0 = all
};

void read_rope(const Json& config, GptOssConfig& c) {
  config.at(given(config, "rope_parameters") ? "rope_parameters" : "rope_scaling");  // no default
  const Json rope = rope_parameters(config);
  check_known(rope, {"rope_theta", "rope_type", "factor", "beta_fast", "beta_slow", "truncate", "mscale",
                     "mscale_all_dim", "attention_factor", "original_max_position_embeddings"});
  const double theta = rope.at("rope_theta").as_double();
  check_within(config, "rope_theta", theta, 1 + 1e-9, 1e12);
  c.shape.rope_frequencies = rope_inverse_frequencies(theta, c.head_size);
  if (rope.string_or("rope_type", "default") == "default") return;
  check_is(rope, "rope_type", "\"yarn\"");
  const YarnScaling yarn = read_yarn(rope);
  check_is(config, "initial_context_length", json_number(yarn.original_length));
  c.shape.rope_frequencies = yarn_inverse_frequencies(theta, c.head_size, yarn);
  const double mscale = rope.double_or("mscale", 0), all_dim = rope.double_or("mscale_all_dim", 0);
  const bool both = mscale != 0 && all_dim != 0;
  const double usual = both ? yarn_magnitude(yarn, mscale) / yarn_magnitude(yarn, all_dim) : yarn_magnitude(yarn, 1);
  c.shape.rope_scale = rope.double_or("attention_factor", usual);
  check_within(rope, "mscale", mscale, -1e-9, 1e3);
  check_within(rope, "mscale_all_dim", all_dim, -1e-9, 1e3);
  check_within(rope, "attention_factor", c.shape.rope_scale, 1e-6, 1e6);
}

GptOssConfig read_config(const Json& config) {
  check_is(config, "swiglu_limit", json_number(kSwigluLimit));
  check_is(config, "swiglu_alpha", json_number(kSwigluAlpha));
  check_is(config, "experts_per_token", config.at("num_experts_per_tok").dump());
  check_is(config, "partial_rotary_factor", "1");
  if (given(config, "quantization_config")) {
    const Json method = config.at("quantization_config").at("quant_method");
    if (method.as_string() != "mxfp4") refuse(method, "\"mxfp4\"");
  }
  GptOssConfig c;
  c.shape = read_moe_shape(config);
  c.heads = size_of(config, "num_attention_heads");
  c.kv_heads = size_of(config, "num_key_value_heads");
  check_divides(config, "num_attention_heads", "num_key_value_heads");
  c.head_size = size_of(config, "head_dim", 512);
  check_even(config, "head_dim", c.head_size);
  c.intermediate = size_of(config, "intermediate_size");
  c.attention_bias = config.at("attention_bias").as_bool();
  for (const bool sliding : read_layer_types(config, c.shape.layers, "sliding_attention", "full_attention")) {
    c.windows.push_back(sliding ? size_of(config, "sliding_window") : 0);
  }
  read_rope(config, c);
  return c;
}

class GptOssLayer final : public DecoderLayer {
 public:
  GptOssLayer(const GptOssConfig& config, int64_t layer, const ParameterTable& table)
      : config_(config), layer_(layer), of_{table, layer} {}

  RoutedTokens attend_and_route(const at::Tensor& hidden, const LayerContext& context) const override {
    const double eps = config_.shape.rms_norm_eps, scale = 1.0 / std::sqrt(static_cast<double>(config_.head_size));
    const at::Tensor normed = cheap(context, [=, this] { return rms_norm(hidden, input_norm_, eps); });
    const at::Tensor qkv = linear(normed, qkv_, *context.weight_grads, config_.attention_bias ? &qkv_bias_ : nullptr);
    const auto [q, k, v] = cheap_heads(context, [=, this, rope = context.rope, positions = context.positions] {
      return split_and_rotate(qkv, rope, positions, config_.heads, config_.kv_heads);
    });
    const at::Tensor attended = attend(context, layer_, q, k, v, scale, config_.windows[layer_], sinks_).flatten(1);
    const at::Tensor projected =
        linear(attended, output_, *context.weight_grads, config_.attention_bias ? &output_bias_ : nullptr);
    auto [residual, post] = add_rms_norm(projected, hidden, post_norm_, eps);
    const RouterOptions options{.top_k = config_.shape.top_k, .bias = router_bias_};
    return {residual, post, route(context, post, router_, options)};
  }

  const Parameter& first_expert_weight() const override { return gate_up_; }

  ExpertRows run_experts(const ExpertRows& rows, const at::Tensor& row_weights,
                         const LayerContext& context) const override {
    WeightGradQueue& queue = *context.weight_grads;
    const at::Tensor& offsets = rows.offsets;
    const at::Tensor gate_up = add_expert_bias_(grouped_linear(rows, gate_up_, queue, /*input_major=*/true).value,
                                                gate_up_bias_, offsets, {}, queue);
    const auto make = [=] { return clamped_swiglu(gate_up, row_weights, kSwigluAlpha, kSwigluLimit, offsets); };
    const at::Tensor result = grouped_linear(cheap(context, make, down_), down_, offsets, queue, /*input_major=*/true);
    return {add_expert_bias_(result, down_bias_, offsets, row_weights, queue), offsets};
  }

  at::Tensor combine_and_add(const at::Tensor& residual, const at::Tensor&, const ExpertRows& rows, const RowMap& map,
                             const LayerContext&) const override {
    return sum_rows(rows, map, residual);
  }

 private:
  GptOssConfig config_;
  int64_t layer_;
  LayerParameters of_;
  Parameter input_norm_ = of_("input_norm");              // [H]
  Parameter qkv_ = of_("qkv");                            // [(Hq + 2·Hkv)·D, H]
  Parameter qkv_bias_ = of_.if_any("qkv_bias");           // [(Hq + 2·Hkv)·D]
  Parameter sinks_ = of_("sinks");                        // [Hq]
  Parameter output_ = of_("output");                      // [H, Hq·D]
  Parameter output_bias_ = of_.if_any("output_bias");     // [H]
  Parameter post_norm_ = of_("post_norm");                // [H]
  Parameter router_ = of_("router");                      // [E, H]
  Parameter router_bias_ = of_("router_bias");            // [E]
  Parameter gate_up_ = of_("experts.gate_up");            // [E, H, 2I], gate in even columns, up in odd ones
  Parameter gate_up_bias_ = of_("experts.gate_up_bias");  // [E, 2I]
  Parameter down_ = of_("experts.down");                  // [E, I, H]
  Parameter down_bias_ = of_("experts.down_bias");        // [E, H]
};

class GptOss final : public MoeModel {
 public:
  explicit GptOss(GptOssConfig config) : config_(std::move(config)) {}

  const ModelShape& shape() const override { return config_.shape; }

  std::vector<ParameterSpec> layer_specs(int64_t layer) const override {
    const int64_t hidden = config_.shape.hidden, experts = config_.shape.experts, inner = config_.intermediate;
    const int64_t q_rows = config_.heads * config_.head_size, kv_rows = config_.kv_heads * config_.head_size;
    const double deviation = config_.shape.initializer_range;
    LayerSpecs specs(config_.shape, layer);
    specs.norm("input_norm", hidden, "input_layernorm.weight");
    specs.stacked("qkv", {{"self_attn.q_proj.weight", {q_rows, hidden}},
                          {"self_attn.k_proj.weight", {kv_rows, hidden}},
                          {"self_attn.v_proj.weight", {kv_rows, hidden}}});
    specs.constant("sinks", {config_.heads}, "self_attn.sinks", deviation).init = InitKind::kNormal;
    specs.matrix("output", {hidden, q_rows}, "self_attn.o_proj.weight");
    if (config_.attention_bias) {
      specs.stacked("qkv_bias", {{"self_attn.q_proj.bias", {q_rows}},
                                 {"self_attn.k_proj.bias", {kv_rows}},
                                 {"self_attn.v_proj.bias", {kv_rows}}});
      specs.constant("output_bias", {hidden}, "self_attn.o_proj.bias", 0);
    }
    specs.norm("post_norm", hidden, "post_attention_layernorm.weight");
    specs.matrix("router", {experts, hidden}, "mlp.router.weight", UpdateRule::kAdamW);
    specs.constant("router_bias", {experts}, "mlp.router.bias", deviation).init = InitKind::kNormal;
    ParameterSpec& gate_up = specs.matrix("experts.gate_up", {experts, hidden, 2 * inner}, "mlp.experts.gate_up_proj");
    gate_up.parts[0].turns = {1, 1};
    gate_up.expert = true;
    specs.constant("experts.gate_up_bias", {experts, 2 * inner}, "mlp.experts.gate_up_proj_bias", 0).expert = true;
    specs.matrix("experts.down", {experts, inner, hidden}, "mlp.experts.down_proj").expert = true;
    specs.constant("experts.down_bias", {experts, hidden}, "mlp.experts.down_proj_bias", 0).expert = true;
    return specs.take();
  }

  std::unique_ptr<DecoderLayer> make_layer(int64_t layer, const ParameterTable& table) const override {
    return std::make_unique<GptOssLayer>(config_, layer, table);
  }

  double mixing_flops_per_token(int64_t seq_len) const override {
    const double length = seq_len, q_rows = config_.heads * config_.head_size;
    double scores = 0;  // QKᵀ and PV over the keys that a row sees, in the mean
    for (const int64_t window : config_.windows) {
      const double reach = window == 0 ? length : std::min<double>(window, length);
      scores += 4 * q_rows * reach * (1 - reach / (2 * length));
    }
    return scores;
  }

  ActivationBytes activation_bytes(int64_t, int64_t element) const override {
    const int64_t hidden = config_.shape.hidden, experts = config_.shape.experts, inner = config_.intermediate;
    const int64_t q = config_.heads * config_.head_size, kv = config_.kv_heads * config_.head_size;
    ActivationBytes bytes;
    // Input, normed, residual, normed again; qkv (v is in it), q, k and what attention gave. In fp32 its log-sum-exp,
    // cos and sin, the router's logits and theirs, experts and weights.
    bytes.token = element * (4 * hidden + (q + 2 * kv) + q + kv + q) +
                  4 * (config_.heads + config_.head_size + experts + 1 + 2 * config_.shape.top_k);
    // Row, gate and up, activated; weight, and twice the number of its expert.
    bytes.expert_row = element * (hidden + 2 * inner + inner) + 4 + 2 * 8;
    bytes.token_cheap = element * (hidden + q + kv);
    bytes.expert_row_cheap = element * (hidden + inner);
    bytes.token_backward = element * (2 * (q + 2 * kv) + 4 * hidden + 2 * experts) + 4 * 2 * q;
    // The gradient of the result, its copy in fp32 for that of the bias, and then those of activated, gate and up.
    bytes.expert_row_backward = (element + 4) * std::max(hidden, 2 * inner) + element * inner;
    bytes.token_ring = 4 * (2 * q + 3 * 2 * kv);  // fp32: a sum and a part of it, three keys and values
    return bytes;
  }

 private:
  GptOssConfig config_;
};

}  // namespace

std::unique_ptr<MoeModel> open_gpt_oss(const Json& config) { return std::make_unique<GptOss>(read_config(config)); }

}  // namespace marrow
