#include "models/qwen3_moe.h"

#include "models/family_specs.h"
#include "models/key_value_cache.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/qk_norm_rope.h"
#include "ops/rms_norm.h"
#include "ops/rows.h"
#include "ops/swiglu.h"
#include "parallel/context_attention.h"

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

[[noreturn]] void refuse(const Json& value, const std::string& supported) {
  value.fail(fmt::format("{} is not supported for qwen3_moe", value.dump()),
             Fix(fmt::format("set it to {}", supported)));
}

void refuse_unsupported(const Json& config) {
  const auto must_be = [&](const char* key, const char* supported) {
    if (config.has(key) && config.at(key).dump() != supported) refuse(config.at(key), supported);
  };
  must_be("hidden_act", "\"silu\"");
  must_be("attention_bias", "false");
  must_be("use_sliding_window", "false");
  must_be("decoder_sparse_step", "1");
  must_be("rope_scaling", "null");
  if (config.double_or("attention_dropout", 0.0) != 0.0) refuse(config.at("attention_dropout"), "0");
  if (config.has("mlp_only_layers") && !config.at("mlp_only_layers").is_null() &&
      config.at("mlp_only_layers").size() > 0) {
    refuse(config.at("mlp_only_layers"), "[]");
  }
}

// The two styles of the Hub: rope_theta of old, rope_parameters.rope_theta since transformers 5.
double read_rope_theta(const Json& config) {
  if (!config.has("rope_parameters")) return config.at("rope_theta").as_double();
  const Json rope = config.at("rope_parameters");
  const std::string type = rope.string_or("rope_type", "default");
  if (type != "default") refuse(rope.at("rope_type"), "\"default\"");
  if (rope.string_or("type", "default") != "default") refuse(rope.at("type"), "\"default\"");
  if (!config.has("rope_theta")) return rope.at("rope_theta").as_double();
  const double theta = config.at("rope_theta").as_double();
  if (rope.has("rope_theta") && rope.at("rope_theta").as_double() != theta) {
    refuse(config.at("rope_theta"), rope.at("rope_theta").dump() + ", as in rope_parameters");
  }
  return theta;
}

int64_t positive(const Json& config, const char* key) {
  const int64_t value = config.at(key).as_int();
  constexpr int64_t kLargest = int64_t{1} << 24;
  if (value <= 0 || value > kLargest) {
    config.at(key).fail(fmt::format("{} is not between 1 and {}", value, kLargest), Fix("set a size of a real model"));
  }
  return value;
}

Qwen3MoeConfig read_config(const Json& config) {
  refuse_unsupported(config);
  Qwen3MoeConfig c;
  c.shape.layers = positive(config, "num_hidden_layers");
  if (c.shape.layers > 1000) refuse(config.at("num_hidden_layers"), "at most 1000");
  c.shape.hidden = positive(config, "hidden_size");
  c.shape.vocab = positive(config, "vocab_size");
  c.shape.max_position = positive(config, "max_position_embeddings");
  c.shape.experts = positive(config, config.has("num_experts") ? "num_experts" : "num_local_experts");
  if (config.int_or("num_local_experts", c.shape.experts) != c.shape.experts) {
    refuse(config.at("num_local_experts"), fmt::format("{}, as num_experts", c.shape.experts));
  }
  c.shape.top_k = positive(config, "num_experts_per_tok");
  c.shape.rms_norm_eps = config.at("rms_norm_eps").as_double();
  c.shape.initializer_range = config.double_or("initializer_range", 0.02);
  c.shape.router_aux_loss_coef = config.double_or("router_aux_loss_coef", 1e-3);
  c.shape.tied_embeddings = config.bool_or("tie_word_embeddings", false);
  c.heads = positive(config, "num_attention_heads");
  c.kv_heads = positive(config, "num_key_value_heads");
  c.head_size = config.int_or("head_dim", c.shape.hidden / c.heads);
  c.intermediate = positive(config, "moe_intermediate_size");
  c.rope_theta = read_rope_theta(config);
  const auto within = [&](const char* key, double value, double low, double high) {
    if (value > low && value < high) return;
    config.fail(fmt::format("{} = {} is not between {} and {}", key, value, low, high),
                Fix(fmt::format("set {} as the published models do", key)));
  };
  within("rms_norm_eps", c.shape.rms_norm_eps, 0, 0.1);
  within("rope_theta", c.rope_theta, 1, 1e12);
  within("initializer_range", c.shape.initializer_range, 0, 10);
  within("router_aux_loss_coef", c.shape.router_aux_loss_coef, -1e-9, 1e3);
  within("head_dim", static_cast<double>(c.head_size), 1, 1025);
  within("the number of experts", static_cast<double>(c.shape.experts), 0, 1e5);
  c.norm_topk_prob = config.at("norm_topk_prob").as_bool();
  if (c.heads % c.kv_heads != 0) {
    config.at("num_key_value_heads")
        .fail(fmt::format("{} does not divide num_attention_heads = {}", c.kv_heads, c.heads),
              Fix("set num_key_value_heads to a divisor of num_attention_heads"));
  }
  if (c.head_size % 2 != 0) {
    config.fail(fmt::format("head_dim = {} is odd; RoPE turns pairs", c.head_size),
                Fix("set head_dim to an even number"));
  }
  if (c.shape.top_k > c.shape.experts) {
    config.at("num_experts_per_tok")
        .fail(fmt::format("{} exceeds the {} experts", c.shape.top_k, c.shape.experts),
              Fix("lower num_experts_per_tok"));
  }
  return c;
}

std::string hub_prefix(int64_t layer) { return fmt::format("model.layers.{}.", layer); }

class Qwen3MoeLayer final : public DecoderLayer {
 public:
  Qwen3MoeLayer(const Qwen3MoeConfig& config, int64_t layer, const ParameterTable& table, RopeTable rope)
      : config_(config), layer_(layer), rope_(std::move(rope)) {
    const auto get = [&](const char* name) { return table.at(fmt::format("layers.{}.{}", layer, name)); };
    input_norm_ = get("input_norm");
    qkv_ = get("qkv");
    q_norm_ = get("q_norm");
    k_norm_ = get("k_norm");
    output_ = get("output");
    post_norm_ = get("post_norm");
    router_ = get("router");
    gate_up_ = get("experts.gate_up");
    down_ = get("experts.down");
  }

  RoutedTokens attend_and_route(const at::Tensor& hidden, const LayerContext& context) const override {
    const double eps = config_.shape.rms_norm_eps;
    const at::Tensor normed = rms_norm(hidden, input_norm_, eps);
    const at::Tensor qkv = linear(normed, qkv_, *context.weight_grads);
    const auto [q, k, v] =
        qk_norm_rope(qkv, q_norm_, k_norm_, rope_, context.positions, config_.heads, config_.kv_heads, eps);
    if (context.recompute != nullptr) {
      context.recompute->add({normed}, [=, this] { return std::vector{rms_norm(hidden, input_norm_, eps)}; });
      context.recompute->add({q, k}, [=, this, positions = context.positions] {
        const auto [q_again, k_again, view] =
            qk_norm_rope(qkv, q_norm_, k_norm_, rope_, positions, config_.heads, config_.kv_heads, eps);
        return std::vector{q_again, k_again};
      });
    }
    const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_size));
    const at::Tensor attended =
        context.cache != nullptr
            ? context.cache->attend(layer_, q, k, v, scale)
            : context_attention(q, k, v, context.attention, scale, context.deterministic, context.context_ring);
    const at::Tensor projected = linear(attended.flatten(1), output_, *context.weight_grads);
    auto [residual, post] = add_rms_norm(projected, hidden, post_norm_, eps);
    RouterOptions options;
    options.top_k = config_.shape.top_k;
    options.normalize = config_.norm_topk_prob;
    options.forced = context.forced_routing;
    RouterOutput routing = router(post, router_, context.selection_bias, context.balance_groups, options,
                                  context.balance, *context.weight_grads);
    return {std::move(residual), std::move(post), std::move(routing)};
  }

  const Parameter& first_expert_weight() const override { return gate_up_; }

  ExpertRows run_experts(const ExpertRows& rows, const at::Tensor& row_weights,
                         const LayerContext& context) const override {
    const ExpertRows gate_up = grouped_linear(rows, gate_up_, *context.weight_grads);
    const ExpertRows activated = swiglu(gate_up, row_weights, down_);
    if (context.recompute != nullptr) {
      context.recompute->add({activated.value}, [=] { return std::vector{swiglu(gate_up.value, row_weights)}; });
    }
    return grouped_linear(activated, down_, *context.weight_grads);
  }

  at::Tensor combine_and_add(const at::Tensor& residual, const at::Tensor&, const ExpertRows& rows, const RowMap& map,
                             const LayerContext&) const override {
    return sum_rows(rows, map, residual);
  }

 private:
  Qwen3MoeConfig config_;
  int64_t layer_;
  RopeTable rope_;
  Parameter input_norm_;  // [H]
  Parameter qkv_;         // [(Hq + 2·Hkv)·D, H]
  Parameter q_norm_;      // [D]
  Parameter k_norm_;      // [D]
  Parameter output_;      // [H, Hq·D]
  Parameter post_norm_;   // [H]
  Parameter router_;      // [E, H]
  Parameter gate_up_;     // [E, 2I, H], each expert's gate before its up
  Parameter down_;        // [E, H, I]
};

class Qwen3Moe final : public MoeModel {
 public:
  explicit Qwen3Moe(Qwen3MoeConfig config) : config_(std::move(config)) {}

  const ModelShape& shape() const override { return config_.shape; }

  std::vector<ParameterSpec> embedding_specs() const override {
    ParameterSpec spec = matrix("embedding", {config_.shape.vocab, config_.shape.hidden}, "model.embed_tokens.weight");
    spec.rule = UpdateRule::kAdamW;
    return {spec};
  }

  std::vector<ParameterSpec> layer_specs(int64_t layer) const override {
    const int64_t hidden = config_.shape.hidden, size = config_.head_size;
    const int64_t q_rows = config_.heads * size, kv_rows = config_.kv_heads * size;
    const std::string hub = hub_prefix(layer), own = fmt::format("layers.{}.", layer);

    ParameterSpec qkv = matrix(own + "qkv", {q_rows + 2 * kv_rows, hidden}, "");
    qkv.parts = {{hub + "self_attn.q_proj.weight", {q_rows, hidden}},
                 {hub + "self_attn.k_proj.weight", {kv_rows, hidden}},
                 {hub + "self_attn.v_proj.weight", {kv_rows, hidden}}};
    ParameterSpec router = matrix(own + "router", {config_.shape.experts, hidden}, hub + "mlp.gate.weight");
    router.rule = UpdateRule::kAdamW;

    std::vector<ParameterSpec> specs{norm(own + "input_norm", hidden, hub + "input_layernorm.weight"),
                                     std::move(qkv),
                                     norm(own + "q_norm", size, hub + "self_attn.q_norm.weight"),
                                     norm(own + "k_norm", size, hub + "self_attn.k_norm.weight"),
                                     matrix(own + "output", {hidden, q_rows}, hub + "self_attn.o_proj.weight"),
                                     norm(own + "post_norm", hidden, hub + "post_attention_layernorm.weight"),
                                     std::move(router)};
    std::vector<std::string> experts;
    for (int64_t e = 0; e < config_.shape.experts; ++e) experts.push_back(fmt::format("{}mlp.experts.{}.", hub, e));
    add_mlp_specs(specs, own + "experts.", experts, hidden, config_.intermediate, true,
                  config_.shape.initializer_range);
    return specs;
  }

  std::vector<ParameterSpec> head_specs() const override {
    std::vector<ParameterSpec> specs = {norm("final_norm", config_.shape.hidden, "model.norm.weight")};
    if (config_.shape.tied_embeddings) return specs;
    specs.push_back(matrix("head", {config_.shape.vocab, config_.shape.hidden}, "lm_head.weight"));
    specs.back().rule = UpdateRule::kAdamW;
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

  at::Tensor final_norm(const at::Tensor& hidden, const ParameterTable& table) const override {
    return rms_norm(hidden, table.at("final_norm"), config_.shape.rms_norm_eps);
  }

  double forward_flops_per_token(int64_t seq_len) const override {
    const double hidden = config_.shape.hidden;
    const double q_rows = config_.heads * config_.head_size;
    const double kv_rows = config_.kv_heads * config_.head_size;
    const double projections = 2 * hidden * (2 * q_rows + 2 * kv_rows);
    const double scores = 2 * q_rows * seq_len;  // QKᵀ and PV, half of each
    const double router = 2 * hidden * config_.shape.experts;
    const double experts = 2 * 3 * hidden * config_.intermediate * config_.shape.top_k;
    return config_.shape.layers * (projections + scores + router + experts) + 2 * hidden * config_.shape.vocab;
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
