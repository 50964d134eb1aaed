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
  double rope_theta = 0;
  bool norm_topk_prob = false;
};

Qwen3MoeConfig read_config(const Json& config) {
  check_is(config, "attention_bias", "false");
  check_is(config, "use_sliding_window", "false");
  check_is(config, "decoder_sparse_step", "1");
  check_is(config, "mlp_only_layers", "[]");
  refuse_quantised(config);
  Qwen3MoeConfig c;
  c.shape = read_shape(config);
  c.shape.experts = read_experts(config);
  c.shape.top_k = size_of(config, "num_experts_per_tok", static_cast<double>(c.shape.experts));
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
  c.rope_theta = rope.at("rope_theta").as_double();
  check_within(config, "rope_theta", c.rope_theta, 1 + 1e-9, 1e12);
  return c;
}

class Qwen3MoeLayer final : public DecoderLayer {
 public:
  Qwen3MoeLayer(const Qwen3MoeConfig& config, int64_t layer, const ParameterTable& table, RopeTable rope)
      : config_(config), layer_(layer), rope_(std::move(rope)), of_{table, layer} {}

  RoutedTokens attend_and_route(const at::Tensor& hidden, const LayerContext& context) const override {
    const double eps = config_.shape.rms_norm_eps, scale = 1.0 / std::sqrt(static_cast<double>(config_.head_size));
    const at::Tensor normed = cheap(context, [=, this] { return rms_norm(hidden, input_norm_, eps); });
    const at::Tensor qkv = linear(normed, qkv_, *context.weight_grads);
    const auto turn = [=, this, positions = context.positions] {
      return qk_norm_rope(qkv, q_norm_, k_norm_, rope_, positions, config_.heads, config_.kv_heads, eps);
    };
    const auto [q, k, v] = turn();
    if (context.recompute != nullptr) {
      context.recompute->add({q, k}, [turn] {
        const auto [q_again, k_again, view] = turn();
        return std::vector{q_again, k_again};
      });
    }
    const at::Tensor attended = attend(context, layer_, q, k, v, scale).flatten(1);
    auto [residual, post] = add_rms_norm(linear(attended, output_, *context.weight_grads), hidden, post_norm_, eps);
    RouterOptions options;
    options.top_k = config_.shape.top_k;
    options.normalize = config_.norm_topk_prob;
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
  RopeTable rope_;
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
    const std::string hub = fmt::format("model.layers.{}.", layer), own = fmt::format("layers.{}.", layer);

    ParameterSpec qkv = matrix(own + "qkv", {q_rows + 2 * kv_rows, hidden}, "");
    qkv.parts = {{hub + "self_attn.q_proj.weight", {q_rows, hidden}},
                 {hub + "self_attn.k_proj.weight", {kv_rows, hidden}},
                 {hub + "self_attn.v_proj.weight", {kv_rows, hidden}}};
    std::vector<ParameterSpec> specs{
        norm(own + "input_norm", hidden, hub + "input_layernorm.weight"),
        std::move(qkv),
        norm(own + "q_norm", size, hub + "self_attn.q_norm.weight"),
        norm(own + "k_norm", size, hub + "self_attn.k_norm.weight"),
        matrix(own + "output", {hidden, q_rows}, hub + "self_attn.o_proj.weight"),
        norm(own + "post_norm", hidden, hub + "post_attention_layernorm.weight"),
        adamw(matrix(own + "router", {config_.shape.experts, hidden}, hub + "mlp.gate.weight"))};
    std::vector<std::string> experts;
    for (int64_t e = 0; e < config_.shape.experts; ++e) experts.push_back(fmt::format("{}mlp.experts.{}.", hub, e));
    add_mlp_specs(specs, own + "experts.", experts, hidden, config_.intermediate, true,
                  config_.shape.initializer_range);
    return specs;
  }

  std::unique_ptr<DecoderLayer> make_layer(int64_t layer, const ParameterTable& table,
                                           at::Device device) const override {
    if (!rope_.cos.defined()) {
      rope_ = make_rope_table(rope_inverse_frequencies(config_.rope_theta, config_.head_size),
                              config_.shape.max_position, 1.0, device);
    }
    return std::make_unique<Qwen3MoeLayer>(config_, layer, table, rope_);
  }

  double mixing_flops_per_token(int64_t seq_len) const override {
    return 2.0 * config_.shape.layers * config_.heads * config_.head_size * seq_len;  // QKᵀ and PV, half of each
  }

  ActivationBytes activation_bytes(int64_t, int64_t element) const override {
    const int64_t hidden = config_.shape.hidden, experts = config_.shape.experts, inner = config_.intermediate;
    const int64_t q = config_.heads * config_.head_size, kv = config_.kv_heads * config_.head_size;
    ActivationBytes bytes;
    // Input, normed, residual, normed again; qkv (v is in it), q, k and what attention gave. In fp32 its log-sum-exp,
    // the router's logits and theirs, experts and weights.
    bytes.token = element * (4 * hidden + (q + 2 * kv) + q + kv + q) +
                  4 * (config_.heads + experts + 1 + 2 * config_.shape.top_k);
    bytes.expert_row = element * (hidden + 2 * inner + inner) + 4;  // row, gate and up, activated, weight
    bytes.token_cheap = element * (hidden + q + kv);
    bytes.expert_row_cheap = element * (hidden + inner);
    bytes.token_backward = element * (2 * (q + 2 * kv) + 4 * hidden + 2 * experts);
    // The gradient of the result, and then those of activated, gate and up, or that of the row.
    bytes.expert_row_backward = element * (hidden + std::max(hidden, 3 * inner));
    bytes.token_ring = 4 * (2 * q + 3 * 2 * kv);  // fp32: a sum and a part of it, three keys and values
    return bytes;
  }

 private:
  ParameterSpec matrix(std::string name, std::vector<int64_t> shape, std::string hub_name) const {
    return matrix_spec(std::move(name), std::move(shape), std::move(hub_name), config_.shape.initializer_range);
  }

  static ParameterSpec norm(std::string name, int64_t size, std::string hub_name) {
    return constant_spec(std::move(name), {size}, std::move(hub_name), 1);
  }

  Qwen3MoeConfig config_;
  mutable RopeTable rope_;  // made once, shared by the layers
};

}  // namespace

std::unique_ptr<MoeModel> open_qwen3_moe(const Json& config) { return std::make_unique<Qwen3Moe>(read_config(config)); }

}  // namespace marrow
