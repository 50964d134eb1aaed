#include "models/gpt_oss.h"

#include "models/family_specs.h"
#include "models/key_value_cache.h"
#include "ops/expert_bias.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/qk_norm_rope.h"
#include "ops/rms_norm.h"
#include "ops/rows.h"
#include "ops/swiglu.h"
#include "parallel/context_attention.h"

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
  std::vector<double> inverse_frequencies;
  double rope_scale = 1;  // of cos and sin
};

[[noreturn]] void refuse(const Json& value, const std::string& supported) {
  value.fail(fmt::format("{} is not supported for gpt_oss", value.dump()), Fix(fmt::format("set it to {}", supported)));
}

void refuse_unsupported(const Json& config) {
  const auto must_be = [&](const char* key, double supported) {
    if (config.has(key) && config.at(key).as_double() != supported) refuse(config.at(key), json_text(supported));
  };
  if (config.string_or("hidden_act", "silu") != "silu") refuse(config.at("hidden_act"), "\"silu\"");
  must_be("attention_dropout", 0);
  must_be("swiglu_limit", kSwigluLimit);
  must_be("swiglu_alpha", kSwigluAlpha);
  if (config.has("experts_per_token")) must_be("experts_per_token", config.at("num_experts_per_tok").as_double());
  if (config.has("num_experts")) must_be("num_experts", config.at("num_local_experts").as_double());
  if (config.double_or("partial_rotary_factor", 1.0) != 1.0) refuse(config.at("partial_rotary_factor"), "1");
  if (config.has("quantization_config") && !config.at("quantization_config").is_null()) {
    const Json method = config.at("quantization_config").at("quant_method");
    if (method.as_string() != "mxfp4") refuse(method, "\"mxfp4\"");
  }
}

int64_t positive(const Json& config, const char* key) {
  const int64_t value = config.at(key).as_int();
  constexpr int64_t kLargest = int64_t{1} << 24;
  if (value <= 0 || value > kLargest) {
    config.at(key).fail(fmt::format("{} is not between 1 and {}", value, kLargest), Fix("set a size of a real model"));
  }
  return value;
}

void check_within(const Json& config, const char* key, double value, double low, double high) {
  if (value > low && value < high) return;
  config.fail(fmt::format("{} = {} is not between {} and {}", key, value, low, high),
              Fix(fmt::format("set {} as the published models do", key)));
}

// The object that says how positions are scaled, in either style of the Hub: rope_scaling of old, rope_parameters since
// transformers 5. With both, they must agree.
Json rope_object(const Json& config) {
  const auto given = [&](const char* key) { return config.has(key) && !config.at(key).is_null(); };
  if (!given("rope_scaling")) return config.at("rope_parameters");
  const Json scaling = config.at("rope_scaling");
  for (const auto& [key, value] : scaling.items()) {
    if (!given("rope_parameters") || !config.at("rope_parameters").has(key)) continue;
    const Json other = config.at("rope_parameters").at(key);
    const bool same =
        value.is_number() && other.is_number() ? value.as_double() == other.as_double() : value.dump() == other.dump();
    if (!same) refuse(value, other.dump() + ", as in rope_parameters");
  }
  return scaling;
}

double read_rope_theta(const Json& config) {
  const bool inside = config.has("rope_parameters") && config.at("rope_parameters").has("rope_theta");
  const double theta = (inside ? config.at("rope_parameters") : config).at("rope_theta").as_double();
  if (config.has("rope_theta") && config.at("rope_theta").as_double() != theta) {
    refuse(config.at("rope_theta"), json_text(theta) + ", as in rope_parameters");
  }
  check_within(config, "rope_theta", theta, 1, 1e12);
  return theta;
}

void read_rope(const Json& config, GptOssConfig& c) {
  const double theta = read_rope_theta(config);
  c.inverse_frequencies = rope_inverse_frequencies(theta, c.head_size);
  const Json rope = rope_object(config);
  constexpr std::array kKnown{"rope_theta",
                              "rope_type",
                              "type",
                              "factor",
                              "beta_fast",
                              "beta_slow",
                              "truncate",
                              "mscale",
                              "mscale_all_dim",
                              "attention_factor",
                              "original_max_position_embeddings"};
  for (const auto& [key, value] : rope.items()) {
    if (std::ranges::find(kKnown, key) != kKnown.end() || value.is_null()) continue;
    value.fail(fmt::format("{} is not supported for gpt_oss", key), Fix(fmt::format("remove {}", key)));
  }
  const std::string type = rope.string_or("rope_type", rope.string_or("type", "default"));
  if (type == "default") return;
  if (type != "yarn") refuse(rope.at(rope.has("rope_type") ? "rope_type" : "type"), "\"yarn\" or \"default\"");
  const double factor = rope.at("factor").as_double();
  check_within(rope, "factor", factor, 0.999, 1e6);
  const auto magnitude = [&](double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; };
  const double mscale = rope.double_or("mscale", 0), all_dim = rope.double_or("mscale_all_dim", 0);
  const bool both = mscale != 0 && all_dim != 0;
  c.rope_scale = rope.double_or("attention_factor", both ? magnitude(mscale) / magnitude(all_dim) : magnitude(1));
  check_within(rope, "mscale", mscale, -1e-9, 1e3);
  check_within(rope, "mscale_all_dim", all_dim, -1e-9, 1e3);
  check_within(rope, "attention_factor", c.rope_scale, 1e-6, 1e6);

  const auto original = static_cast<double>(positive(rope, "original_max_position_embeddings"));
  if (config.double_or("initial_context_length", original) != original) {
    refuse(config.at("initial_context_length"), json_text(original) + ", as original_max_position_embeddings");
  }
  const double fast = rope.double_or("beta_fast", 32), slow = rope.double_or("beta_slow", 1);
  check_within(rope, "beta_slow", slow, 0, 1e6);
  check_within(rope, "beta_fast", fast, 0, 1e6);
  const YarnScaling yarn{factor, original, fast, slow, rope.bool_or("truncate", true)};
  c.inverse_frequencies = yarn_inverse_frequencies(theta, c.head_size, yarn);
}

std::vector<int64_t> read_windows(const Json& config, int64_t layers) {
  const Json types = config.at("layer_types");
  if (static_cast<int64_t>(types.size()) != layers) {
    types.fail(fmt::format("{} entries for {} layers", types.size(), layers), Fix("give one entry a layer"));
  }
  std::vector<int64_t> windows;
  for (const Json& type : types.elements()) {
    const bool sliding = type.as_string() == "sliding_attention";
    if (!sliding && type.as_string() != "full_attention") refuse(type, "\"sliding_attention\" or \"full_attention\"");
    windows.push_back(sliding ? positive(config, "sliding_window") : 0);
  }
  return windows;
}

GptOssConfig read_config(const Json& config) {
  refuse_unsupported(config);
  GptOssConfig c;
  c.shape.layers = positive(config, "num_hidden_layers");
  if (c.shape.layers > 1000) refuse(config.at("num_hidden_layers"), "at most 1000");
  c.shape.hidden = positive(config, "hidden_size");
  c.shape.vocab = positive(config, "vocab_size");
  c.shape.max_position = positive(config, "max_position_embeddings");
  c.shape.experts = positive(config, "num_local_experts");
  c.shape.top_k = positive(config, "num_experts_per_tok");
  c.shape.rms_norm_eps = config.at("rms_norm_eps").as_double();
  c.shape.initializer_range = config.double_or("initializer_range", 0.02);
  c.shape.router_aux_loss_coef = config.double_or("router_aux_loss_coef", 1e-3);
  c.shape.tied_embeddings = config.bool_or("tie_word_embeddings", false);
  c.heads = positive(config, "num_attention_heads");
  c.kv_heads = positive(config, "num_key_value_heads");
  c.head_size = positive(config, "head_dim");
  c.intermediate = positive(config, "intermediate_size");
  c.attention_bias = config.at("attention_bias").as_bool();
  check_within(config, "rms_norm_eps", c.shape.rms_norm_eps, 0, 0.1);
  check_within(config, "initializer_range", c.shape.initializer_range, 0, 10);
  check_within(config, "router_aux_loss_coef", c.shape.router_aux_loss_coef, -1e-9, 1e3);
  check_within(config, "head_dim", static_cast<double>(c.head_size), 1, 513);
  check_within(config, "num_local_experts", static_cast<double>(c.shape.experts), 0, 1e5);
  if (c.heads % c.kv_heads != 0) {
    config.at("num_key_value_heads")
        .fail(fmt::format("{} does not divide num_attention_heads = {}", c.kv_heads, c.heads),
              Fix("set num_key_value_heads to a divisor of num_attention_heads"));
  }
  if (c.head_size % 2 != 0) {
    config.at("head_dim").fail(fmt::format("{} is odd; RoPE turns pairs", c.head_size), Fix("set an even number"));
  }
  if (c.shape.top_k > c.shape.experts) {
    config.at("num_experts_per_tok")
        .fail(fmt::format("{} exceeds the {} experts", c.shape.top_k, c.shape.experts),
              Fix("lower num_experts_per_tok"));
  }
  c.windows = read_windows(config, c.shape.layers);
  read_rope(config, c);
  return c;
}

std::string own_prefix(int64_t layer) { return fmt::format("layers.{}.", layer); }

class GptOssLayer final : public DecoderLayer {
 public:
  GptOssLayer(const GptOssConfig& config, int64_t layer, const ParameterTable& table, RopeTable rope)
      : config_(config), layer_(layer), rope_(std::move(rope)) {
    const auto get = [&](const char* name) { return table.at(own_prefix(layer) + name); };
    input_norm_ = get("input_norm");
    qkv_ = get("qkv");
    sinks_ = get("sinks");
    output_ = get("output");
    if (config.attention_bias) {
      qkv_bias_ = get("qkv_bias");
      output_bias_ = get("output_bias");
    }
    post_norm_ = get("post_norm");
    router_ = get("router");
    router_bias_ = get("router_bias");
    gate_up_ = get("experts.gate_up");
    gate_up_bias_ = get("experts.gate_up_bias");
    down_ = get("experts.down");
    down_bias_ = get("experts.down_bias");
  }

  RoutedTokens attend_and_route(const at::Tensor& hidden, const LayerContext& context) const override {
    const double eps = config_.shape.rms_norm_eps;
    const at::Tensor normed = rms_norm(hidden, input_norm_, eps);
    const at::Tensor qkv = linear(normed, qkv_, *context.weight_grads, config_.attention_bias ? &qkv_bias_ : nullptr);
    const auto [q, k, v] = split_and_rotate(qkv, rope_, context.positions, config_.heads, config_.kv_heads);
    if (context.recompute != nullptr) {
      context.recompute->add({normed}, [=, this] { return std::vector{rms_norm(hidden, input_norm_, eps)}; });
      context.recompute->add({q, k}, [=, this, positions = context.positions] {
        const auto [q_again, k_again, view] = split_and_rotate(qkv, rope_, positions, config_.heads, config_.kv_heads);
        return std::vector{q_again, k_again};
      });
    }
    const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_size));
    AttentionLayout layout = context.attention;
    layout.window = config_.windows[layer_];
    const at::Tensor attended =
        context.cache != nullptr
            ? context.cache->attend(layer_, q, k, v, scale, layout.window, sinks_.value)
            : context_attention(q, k, v, layout, scale, context.deterministic, context.context_ring, sinks_);
    const at::Tensor projected =
        linear(attended.flatten(1), output_, *context.weight_grads, config_.attention_bias ? &output_bias_ : nullptr);
    auto [residual, post] = add_rms_norm(projected, hidden, post_norm_, eps);
    RouterOptions options;
    options.top_k = config_.shape.top_k;
    options.forced = context.forced_routing;
    options.bias = router_bias_;
    RouterOutput routing = router(post, router_, context.selection_bias, context.balance_groups, options,
                                  context.balance, *context.weight_grads);
    return {std::move(residual), std::move(post), std::move(routing)};
  }

  const Parameter& first_expert_weight() const override { return gate_up_; }

  ExpertRows run_experts(const ExpertRows& rows, const at::Tensor& row_weights,
                         const LayerContext& context) const override {
    WeightGradQueue& queue = *context.weight_grads;
    const at::Tensor& offsets = rows.offsets;
    const at::Tensor gate_up = add_expert_bias_(grouped_linear(rows, gate_up_, queue, /*input_major=*/true).value,
                                                gate_up_bias_, offsets, {}, queue);
    const auto activate = [=] { return clamped_swiglu(gate_up, row_weights, kSwigluAlpha, kSwigluLimit); };
    const at::Tensor activated = activate();
    if (context.recompute != nullptr) context.recompute->add({activated}, [=] { return std::vector{activate()}; });
    const at::Tensor result = grouped_linear(activated, down_, offsets, queue, /*input_major=*/true);
    return {add_expert_bias_(result, down_bias_, offsets, row_weights, queue), offsets};
  }

  at::Tensor combine_and_add(const at::Tensor& residual, const at::Tensor&, const ExpertRows& rows, const RowMap& map,
                             const LayerContext&) const override {
    return sum_rows(rows, map, residual);
  }

 private:
  GptOssConfig config_;
  int64_t layer_;
  RopeTable rope_;
  Parameter input_norm_;    // [H]
  Parameter qkv_;           // [(Hq + 2·Hkv)·D, H]
  Parameter qkv_bias_;      // [(Hq + 2·Hkv)·D]
  Parameter sinks_;         // [Hq]
  Parameter output_;        // [H, Hq·D]
  Parameter output_bias_;   // [H]
  Parameter post_norm_;     // [H]
  Parameter router_;        // [E, H]
  Parameter router_bias_;   // [E]
  Parameter gate_up_;       // [E, H, 2I], gate in even columns, up in odd ones
  Parameter gate_up_bias_;  // [E, 2I]
  Parameter down_;          // [E, I, H]
  Parameter down_bias_;     // [E, H]
};

class GptOss final : public MoeModel {
 public:
  explicit GptOss(GptOssConfig config) : config_(std::move(config)) {}

  const ModelShape& shape() const override { return config_.shape; }

  std::vector<ParameterSpec> embedding_specs() const override {
    ParameterSpec spec = matrix("embedding", {config_.shape.vocab, config_.shape.hidden}, "model.embed_tokens.weight");
    spec.rule = UpdateRule::kAdamW;
    return {spec};
  }

  std::vector<ParameterSpec> layer_specs(int64_t layer) const override {
    const int64_t hidden = config_.shape.hidden, experts = config_.shape.experts, inner = config_.intermediate;
    const int64_t q_rows = config_.heads * config_.head_size, kv_rows = config_.kv_heads * config_.head_size;
    const std::string hub = fmt::format("model.layers.{}.", layer), own = own_prefix(layer);
    const std::string attention = hub + "self_attn.", mlp = hub + "mlp.";
    std::vector<ParameterSpec> specs;
    const auto add = [&](ParameterSpec spec) -> ParameterSpec& { return specs.emplace_back(std::move(spec)); };

    add(constant_spec(own + "input_norm", {hidden}, hub + "input_layernorm.weight", 1));
    add(matrix(own + "qkv", {q_rows + 2 * kv_rows, hidden}, "")).parts = {
        {attention + "q_proj.weight", {q_rows, hidden}},
        {attention + "k_proj.weight", {kv_rows, hidden}},
        {attention + "v_proj.weight", {kv_rows, hidden}}};
    add(random_vector(own + "sinks", config_.heads, attention + "sinks"));
    add(matrix(own + "output", {hidden, q_rows}, attention + "o_proj.weight"));
    if (config_.attention_bias) {
      add(constant_spec(own + "qkv_bias", {q_rows + 2 * kv_rows}, "", 0)).parts = {
          {attention + "q_proj.bias", {q_rows}},
          {attention + "k_proj.bias", {kv_rows}},
          {attention + "v_proj.bias", {kv_rows}}};
      add(constant_spec(own + "output_bias", {hidden}, attention + "o_proj.bias", 0));
    }
    add(constant_spec(own + "post_norm", {hidden}, hub + "post_attention_layernorm.weight", 1));
    add(matrix(own + "router", {experts, hidden}, mlp + "router.weight")).rule = UpdateRule::kAdamW;
    add(random_vector(own + "router_bias", experts, mlp + "router.bias"));

    ParameterSpec& gate_up =
        add(matrix(own + "experts.gate_up", {experts, hidden, 2 * inner}, mlp + "experts.gate_up_proj"));
    gate_up.parts[0].turns = {1, 1};
    gate_up.expert = true;
    add(constant_spec(own + "experts.gate_up_bias", {experts, 2 * inner}, mlp + "experts.gate_up_proj_bias", 0))
        .expert = true;
    ParameterSpec& down = add(matrix(own + "experts.down", {experts, inner, hidden}, mlp + "experts.down_proj"));
    down.expert = true;
    add(constant_spec(own + "experts.down_bias", {experts, hidden}, mlp + "experts.down_proj_bias", 0)).expert = true;
    return specs;
  }

  std::vector<ParameterSpec> head_specs() const override {
    std::vector<ParameterSpec> specs = {constant_spec("final_norm", {config_.shape.hidden}, "model.norm.weight", 1)};
    if (config_.shape.tied_embeddings) return specs;
    specs.push_back(matrix("head", {config_.shape.vocab, config_.shape.hidden}, "lm_head.weight"));
    specs.back().rule = UpdateRule::kAdamW;
    return specs;
  }

  std::unique_ptr<DecoderLayer> make_layer(int64_t layer, const ParameterTable& table,
                                           at::Device device) const override {
    if (!rope_.cos.defined()) {
      rope_ = make_rope_table(config_.inverse_frequencies, config_.shape.max_position, config_.rope_scale, device);
    }
    return std::make_unique<GptOssLayer>(config_, layer, table, rope_);
  }

  at::Tensor final_norm(const at::Tensor& hidden, const ParameterTable& table) const override {
    return rms_norm(hidden, table.at("final_norm"), config_.shape.rms_norm_eps);
  }

  double forward_flops_per_token(int64_t seq_len) const override {
    const double hidden = config_.shape.hidden, length = seq_len;
    const double q_rows = config_.heads * config_.head_size, kv_rows = config_.kv_heads * config_.head_size;
    const double projections = 2 * hidden * (2 * q_rows + 2 * kv_rows);
    const double router = 2 * hidden * config_.shape.experts;
    const double experts = 2 * 3 * hidden * config_.intermediate * config_.shape.top_k;
    double scores = 0;  // QKᵀ and PV over the keys that a row sees, in the mean
    for (const int64_t window : config_.windows) {
      const double reach = window == 0 ? length : std::min<double>(window, length);
      scores += 4 * q_rows * reach * (1 - reach / (2 * length));
    }
    return config_.shape.layers * (projections + router + experts) + scores + 2 * hidden * config_.shape.vocab;
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
  ParameterSpec matrix(std::string name, std::vector<int64_t> shape, std::string hub_name) const {
    return matrix_spec(std::move(name), std::move(shape), std::move(hub_name), config_.shape.initializer_range);
  }

  ParameterSpec random_vector(std::string name, int64_t size, std::string hub_name) const {
    ParameterSpec spec = constant_spec(std::move(name), {size}, std::move(hub_name), 0);
    spec.init = InitKind::kNormal;
    spec.init_value = static_cast<float>(config_.shape.initializer_range);
    return spec;
  }

  GptOssConfig config_;
  mutable RopeTable rope_;  // made once, shared by the layers
};

}  // namespace

std::unique_ptr<MoeModel> open_gpt_oss(const Json& config) { return std::make_unique<GptOss>(read_config(config)); }

}  // namespace marrow
