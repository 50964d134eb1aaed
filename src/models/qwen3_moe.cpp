// Qwen3-MoE: grouped-query attention with normalised queries and keys, RoPE, softmax top-k routing over SwiGLU experts.
#include "models/config_fields.h"
#include "models/families.h"
#include "models/family_specs.h"
#include "models/layer_operators.h"
#include "ops/linear.h"
#include "ops/qk_norm_rope.h"
#include "ops/rms_norm.h"
#include "ops/rows.h"

namespace marrow {
namespace {

struct Qwen3MoeConfig {
  ModelShape shape;
  int64_t heads = 0;         // Hq
  int64_t kv_heads = 0;      // Hkv
  int64_t head_size = 0;     // D
  int64_t intermediate = 0;  // I, of one expert
  bool norm_topk_prob = false;
};

Qwen3MoeConfig read_config(const Json& config) {
  check_is(config, "attention_bias", "false");
  check_is(config, "use_sliding_window", "false");
  check_is(config, "decoder_sparse_step", "1");
  check_is(config, "mlp_only_layers", "[]");
  check_is(config, "partial_rotary_factor", "1");
  refuse_quantised(config);
  Qwen3MoeConfig c;
  c.shape = read_moe_shape(config);
  if (given(config, "layer_types")) read_layer_types(config, c.shape.layers, "full_attention", "full_attention");
  c.heads = size_of(config, "num_attention_heads");
  c.kv_heads = size_of(config, "num_key_value_heads");
  check_divides(config, "num_attention_heads", "num_key_value_heads");
  c.head_size = config.int_or("head_dim", c.shape.hidden / c.heads);
  check_within(config, "head_dim", static_cast<double>(c.head_size), 2, 512);
  check_even(config, "head_dim", c.head_size);
  c.intermediate = size_of(config, "moe_intermediate_size");
  c.norm_topk_prob = config.at("norm_topk_prob").as_bool();
  const Json rope = rope_parameters(config);
  check_is(rope, "rope_type", "\"default\"");
  check_known(rope, {"rope_type", "rope_theta"});
  const double theta = rope.at("rope_theta").as_double();
  check_within(config, "rope_theta", theta, 1 + 1e-9, 1e12);
  c.shape.rope_frequencies = rope_inverse_frequencies(theta, c.head_size);
  return c;
}

class Qwen3MoeLayer final : public DecoderLayer {
 public:
  Qwen3MoeLayer(const Qwen3MoeConfig& config, int64_t layer, const ParameterTable& table)
      : config_(config), layer_(layer), of_{table, layer} {}

  RoutedTokens attend_and_route(const at::Tensor& hidden, const LayerContext& context) const override {
    const double eps = config_.shape.rms_norm_eps, scale = 1.0 / std::sqrt(static_cast<double>(config_.head_size));
    const at::Tensor normed = cheap(context, [=, this] { return rms_norm(hidden, input_norm_, eps); });
    const at::Tensor qkv = linear(normed, qkv_, *context.weight_grads);
    const auto [q, k, v] = cheap_heads(context, [=, this, rope = context.rope, positions = context.positions] {
      return qk_norm_rope(qkv, q_norm_, k_norm_, rope, positions, config_.heads, config_.kv_heads, eps);
    });
    const at::Tensor attended = attend(context, layer_, q, k, v, scale).flatten(1);
    auto [residual, post] = add_rms_norm(linear(attended, output_, *context.weight_grads), hidden, post_norm_, eps);
    const RouterOptions options{.top_k = config_.shape.top_k, .normalize = config_.norm_topk_prob};
    return {residual, post, route(context, post, router_, options)};
  }

  const Parameter& first_expert_weight() const override { return gate_up_; }

  ExpertRows run_experts(const ExpertRows& rows, const at::Tensor& row_weights,
                         const LayerContext& context) const override {
    return swiglu_experts(context, rows, row_weights, gate_up_, down_);
  }

  at::Tensor combine_and_add(const at::Tensor& residual, const at::Tensor&, const ExpertRows& rows, const RowMap& map,
                             const LayerContext&) const override {
    return sum_rows(rows, map, residual);
  }

 private:
  Qwen3MoeConfig config_;
  int64_t layer_;
  LayerParameters of_;
  Parameter input_norm_ = of_("input_norm");    // [H]
  Parameter qkv_ = of_("qkv");                  // [(Hq + 2·Hkv)·D, H]
  Parameter q_norm_ = of_("q_norm");            // [D]
  Parameter k_norm_ = of_("k_norm");            // [D]
  Parameter output_ = of_("output");            // [H, Hq·D]
  Parameter post_norm_ = of_("post_norm");      // [H]
  Parameter router_ = of_("router");            // [E, H]
  Parameter gate_up_ = of_("experts.gate_up");  // [E, 2I, H], each expert's gate before its up
  Parameter down_ = of_("experts.down");        // [E, H, I]
};

class Qwen3Moe final : public MoeModel {
 public:
  explicit Qwen3Moe(Qwen3MoeConfig config) : config_(std::move(config)) {}

  const ModelShape& shape() const override { return config_.shape; }

  std::vector<ParameterSpec> layer_specs(int64_t layer) const override {
    const int64_t hidden = config_.shape.hidden, size = config_.head_size;
    const int64_t q_rows = config_.heads * size, kv_rows = config_.kv_heads * size;
    LayerSpecs specs(config_.shape, layer);
    specs.norm("input_norm", hidden, "input_layernorm.weight");
    specs.stacked("qkv", {{"self_attn.q_proj.weight", {q_rows, hidden}},
                          {"self_attn.k_proj.weight", {kv_rows, hidden}},
                          {"self_attn.v_proj.weight", {kv_rows, hidden}}});
    specs.norm("q_norm", size, "self_attn.q_norm.weight");
    specs.norm("k_norm", size, "self_attn.k_norm.weight");
    specs.matrix("output", {hidden, q_rows}, "self_attn.o_proj.weight");
    specs.norm("post_norm", hidden, "post_attention_layernorm.weight");
    specs.matrix("router", {config_.shape.experts, hidden}, "mlp.gate.weight", UpdateRule::kAdamW);
    specs.experts("mlp.experts", config_.intermediate);
    return specs.take();
  }

  std::unique_ptr<DecoderLayer> make_layer(int64_t layer, const ParameterTable& table) const override {
    return std::make_unique<Qwen3MoeLayer>(config_, layer, table);
  }

  double mixing_flops_per_token(int64_t seq_len) const override {
    return 2.0 * config_.shape.layers * config_.heads * config_.head_size * seq_len;  // QKᵀ and PV, half of each
  }

  ActivationBytes activation_bytes(int64_t, int64_t element) const override {
    const int64_t hidden = config_.shape.hidden, experts = config_.shape.experts;
    const int64_t q = config_.heads * config_.head_size, kv = config_.kv_heads * config_.head_size;
    ActivationBytes bytes;
    // Input, normed, residual, normed again; qkv (v is in it), q, k and what attention gave. In fp32 its log-sum-exp,
    // the router's logits and theirs, experts and weights.
    bytes.token = element * (4 * hidden + (q + 2 * kv) + q + kv + q) +
                  4 * (config_.heads + experts + 1 + 2 * config_.shape.top_k);
    bytes.token_cheap = element * (hidden + q + kv);
    bytes.token_backward = element * (2 * (q + 2 * kv) + 4 * hidden + 2 * experts);
    bytes.token_ring = 4 * (2 * q + 3 * 2 * kv);  // fp32: a sum and a part of it, three keys and values
    count_swiglu_experts(bytes, element, hidden, config_.intermediate);
    return bytes;
  }

 private:
  Qwen3MoeConfig config_;
};

}  // namespace

std::unique_ptr<MoeModel> open_qwen3_moe(const Json& config) { return std::make_unique<Qwen3Moe>(read_config(config)); }

}  // namespace marrow
