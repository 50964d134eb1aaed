#include "models/deepseek_v2.h"

#include <set>

#include "models/config_fields.h"
#include "models/family_specs.h"
#include "models/key_value_cache.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/mla_rope.h"
#include "ops/rms_norm.h"
#include "ops/rows.h"
#include "ops/swiglu.h"
#include "parallel/context_attention.h"

namespace marrow {
namespace {

constexpr double kLatentEps = 1e-6;  // of the norms on latents, whatever rms_norm_eps says

struct DeepseekConfig {
  ModelShape shape;
  RouterOptions routing;
  DeepseekRope rope;
  int64_t heads = 0;         // Hq
  int64_t query_rank = 0;    // Lq, 0: queries have no latent
  int64_t latent_rank = 0;   // Lkv
  int64_t nope_size = 0;     // Dn, of a head's part without position
  int64_t rope_size = 0;     // Dr, of its part with
  int64_t value_size = 0;    // Dv
  int64_t dense_inner = 0;   // I of a dense layer
  int64_t expert_inner = 0;  // I of an expert
  int64_t shared_inner = 0;  // I of the shared experts together

  int64_t key_size() const { return nope_size + rope_size; }
  bool dense(int64_t layer) const { return layer < shape.dense_layers; }
  int64_t mlp_inner(int64_t layer) const { return dense(layer) ? dense_inner : shared_inner; }
};

bool is_v3(const Json& config) { return config.at("model_type").as_string() == "deepseek_v3"; }

[[noreturn]] void refuse(const Json& value, const std::string& supported) {
  value.fail(fmt::format("{} is not supported for this family", value.dump()),
             Fix(fmt::format("set it to {}", supported)));
}

void refuse_unsupported(const Json& config) {
  const auto must_be = [&](const char* key, const std::string& supported) {
    if (given(config, key) && config.at(key).dump() != supported) refuse(config.at(key), supported);
  };
  must_be("hidden_act", "\"silu\"");
  must_be("attention_bias", "false");
  must_be("mlp_bias", "false");
  must_be("moe_layer_freq", "1");
  must_be("rope_interleave", "true");
  must_be("scoring_func", is_v3(config) ? "\"sigmoid\"" : "\"softmax\"");
  must_be("num_key_value_heads", config.at("num_attention_heads").dump());
  must_be("head_dim", config.at("qk_rope_head_dim").dump());
  must_be("qk_head_dim",
          std::to_string(config.at("qk_nope_head_dim").as_int() + config.at("qk_rope_head_dim").as_int()));
  if (is_v3(config)) must_be("topk_method", "\"noaux_tc\"");
  if (!is_v3(config)) must_be("norm_topk_prob", "false");  // the reference ignores it
  if (config.double_or("attention_dropout", 0.0) != 0.0) refuse(config.at("attention_dropout"), "0");
  if (given(config, "quantization_config")) {
    config.at("quantization_config").fail("quantised weights are not supported", Fix("convert the model to bf16"));
  }
}

RouterOptions read_routing(const Json& config, int64_t experts) {
  RouterOptions routing;
  routing.top_k = size_of(config, "num_experts_per_tok");
  routing.scale = config.at("routed_scaling_factor").as_double();
  check_within(config, "routed_scaling_factor", routing.scale, 1e-6, 1e6);
  routing.sigmoid = is_v3(config);
  routing.normalize = is_v3(config) && config.at("norm_topk_prob").as_bool();
  const std::string method = is_v3(config) ? "noaux_tc" : config.at("topk_method").as_string();
  if (method != "greedy") {
    if (method != "group_limited_greedy" && !is_v3(config)) {
      refuse(config.at("topk_method"), "\"greedy\" or \"group_limited_greedy\"");
    }
    routing.expert_groups = size_of(config, "n_group", 32);
    routing.top_groups = size_of(config, "topk_group");
  }
  const int64_t groups = routing.expert_groups;
  if (experts % groups != 0) refuse(config.at("n_group"), fmt::format("a divisor of the {} experts", experts));
  if (routing.top_groups > groups) refuse(config.at("topk_group"), fmt::format("at most n_group = {}", groups));
  if (routing.top_k > routing.top_groups * (experts / groups)) {
    refuse(config.at("num_experts_per_tok"),
           fmt::format("at most {}, the experts that a token may choose", routing.top_groups * (experts / groups)));
  }
  return routing;
}

DeepseekConfig read_config(const Json& config) {
  refuse_unsupported(config);
  DeepseekConfig c;
  c.shape.layers = size_of(config, "num_hidden_layers", 1000);
  c.shape.dense_layers = size_of(config, "first_k_dense_replace", 1 << 24, 0);
  if (c.shape.moe_layers() < 1) {
    refuse(config.at("first_k_dense_replace"), fmt::format("less than num_hidden_layers = {}", c.shape.layers));
  }
  c.shape.hidden = size_of(config, "hidden_size");
  c.shape.vocab = size_of(config, "vocab_size");
  c.shape.max_position = size_of(config, "max_position_embeddings");
  c.shape.experts = size_of(config, "n_routed_experts", 1e5);
  c.shape.rms_norm_eps = config.at("rms_norm_eps").as_double();
  check_within(config, "rms_norm_eps", c.shape.rms_norm_eps, 1e-12, 0.1);
  c.shape.initializer_range = config.double_or("initializer_range", 0.02);
  check_within(config, "initializer_range", c.shape.initializer_range, 1e-9, 10);
  c.shape.router_aux_loss_coef = config.double_or("router_aux_loss_coef", config.double_or("aux_loss_alpha", 1e-3));
  check_within(config, "aux_loss_alpha", c.shape.router_aux_loss_coef, 0, 1e3);
  c.shape.tied_embeddings = config.bool_or("tie_word_embeddings", false);
  c.routing = read_routing(config, c.shape.experts);
  c.shape.top_k = c.routing.top_k;
  for (int64_t layer = c.shape.dense_layers; is_v3(config) && layer < c.shape.layers; ++layer) {
    c.shape.selection_biases.push_back(
        {fmt::format("model.layers.{}.mlp.gate.e_score_correction_bias", layer), {c.shape.experts}, true});
  }
  c.heads = size_of(config, "num_attention_heads");
  c.query_rank = config.at("q_lora_rank").is_null() ? 0 : size_of(config, "q_lora_rank");
  c.latent_rank = size_of(config, "kv_lora_rank");
  c.nope_size = size_of(config, "qk_nope_head_dim");
  c.rope_size = size_of(config, "qk_rope_head_dim");
  c.value_size = size_of(config, "v_head_dim");
  for (const char* key : {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}) {
    if (config.at(key).as_int() % 2 != 0) refuse(config.at(key), "an even number");
  }
  c.dense_inner = c.shape.dense_layers > 0 ? size_of(config, "intermediate_size") : 0;
  c.expert_inner = size_of(config, "moe_intermediate_size");
  c.shared_inner = c.expert_inner * size_of(config, "n_shared_experts");
  c.rope = read_deepseek_rope(config);
  return c;
}

class DeepseekLayer final : public DecoderLayer {
 public:
  DeepseekLayer(const DeepseekConfig& config, int64_t layer, const ParameterTable& table, RopeTable rope)
      : config_(config), layer_(layer), rope_(std::move(rope)) {
    const auto get = [&](const char* name) { return table.at(fmt::format("layers.{}.{}", layer, name)); };
    input_norm_ = get("input_norm");
    query_ = get(config.query_rank > 0 ? "q_b" : "q");
    if (config.query_rank > 0) {
      query_down_ = get("q_a");
      query_norm_ = get("q_a_norm");
    }
    latent_down_ = get("kv_a");
    latent_norm_ = get("kv_a_norm");
    latent_up_ = get("kv_b");
    output_ = get("output");
    post_norm_ = get("post_norm");
    mlp_gate_up_ = get("mlp.gate_up");
    mlp_down_ = get("mlp.down");
    if (config.dense(layer)) return;
    router_ = get("router");
    gate_up_ = get("experts.gate_up");
    down_ = get("experts.down");
  }

  RoutedTokens attend_and_route(const at::Tensor& hidden, const LayerContext& context) const override {
    WeightGradQueue& queue = *context.weight_grads;
    const at::Tensor normed = rms_norm(hidden, input_norm_, config_.shape.rms_norm_eps);
    if (context.recompute != nullptr) {
      context.recompute->add(
          {normed}, [=, this] { return std::vector{rms_norm(hidden, input_norm_, config_.shape.rms_norm_eps)}; });
    }
    at::Tensor query = normed;
    if (config_.query_rank > 0) query = rms_norm(linear(normed, query_down_, queue), query_norm_, kLatentEps);
    query = linear(query, query_, queue);
    const auto parts =
        linear(normed, latent_down_, queue).split_with_sizes({config_.latent_rank, config_.rope_size}, 1);
    const at::Tensor latent = linear(rms_norm(parts[0], latent_norm_, kLatentEps), latent_up_, queue);
    const auto [q, k, v] =
        mla_rope(query, latent, parts[1], rope_, context.positions, config_.heads, config_.value_size);
    const double scale = config_.rope.softmax_scale / std::sqrt(static_cast<double>(config_.key_size()));
    const at::Tensor attended =
        context.cache != nullptr
            ? context.cache->attend(layer_, q, k, v, scale)
            : context_attention(q, k, v, context.attention, scale, context.deterministic, context.context_ring);
    auto [residual, post] =
        add_rms_norm(linear(attended.flatten(1), output_, queue), hidden, post_norm_, config_.shape.rms_norm_eps);
    if (config_.dense(layer_)) return {std::move(residual), std::move(post), {}};
    RouterOptions options = config_.routing;
    options.forced = context.forced_routing;
    RouterOutput routing =
        router(post, router_, context.selection_bias, context.balance_groups, options, context.balance, queue);
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

  // The shared experts, or a dense layer's only ones, read what the router read.
  at::Tensor combine_and_add(const at::Tensor& residual, const at::Tensor& normed, const ExpertRows& rows,
                             const RowMap& map, const LayerContext& context) const override {
    const at::Tensor gate_up = linear(normed, mlp_gate_up_, *context.weight_grads);
    const at::Tensor activated = swiglu(gate_up);
    if (context.recompute != nullptr) {
      context.recompute->add({activated}, [=] { return std::vector{swiglu(gate_up)}; });
    }
    const at::Tensor sum = residual + linear(activated, mlp_down_, *context.weight_grads);
    return config_.dense(layer_) ? sum : sum_rows(rows, map, sum);
  }

 private:
  DeepseekConfig config_;
  int64_t layer_;
  RopeTable rope_;
  Parameter input_norm_;   // [H]
  Parameter query_down_;   // [Lq, H]
  Parameter query_norm_;   // [Lq]
  Parameter query_;        // [Hq·(Dn + Dr), Lq or H]
  Parameter latent_down_;  // [Lkv + Dr, H]
  Parameter latent_norm_;  // [Lkv]
  Parameter latent_up_;    // [Hq·(Dn + Dv), Lkv]
  Parameter output_;       // [H, Hq·Dv]
  Parameter post_norm_;    // [H]
  Parameter mlp_gate_up_;  // [2I, H]
  Parameter mlp_down_;     // [H, I]
  Parameter router_;       // [E, H]
  Parameter gate_up_;      // [E, 2I, H], each expert's gate before its up
  Parameter down_;         // [E, H, I]
};

class DeepseekV2 final : public MoeModel {
 public:
  explicit DeepseekV2(DeepseekConfig config) : config_(std::move(config)) {}

  const ModelShape& shape() const override { return config_.shape; }

  std::vector<ParameterSpec> embedding_specs() const override {
    ParameterSpec spec = matrix("embedding", {config_.shape.vocab, config_.shape.hidden}, "model.embed_tokens.weight");
    spec.rule = UpdateRule::kAdamW;
    return {spec};
  }

  std::vector<ParameterSpec> layer_specs(int64_t layer) const override {
    const DeepseekConfig& c = config_;
    const int64_t hidden = c.shape.hidden, q_rows = c.heads * c.key_size();
    const std::string own = fmt::format("layers.{}.", layer), hub = fmt::format("model.layers.{}.", layer);
    const std::string attention = hub + "self_attn.";
    std::vector<ParameterSpec> specs{norm(own + "input_norm", hidden, hub + "input_layernorm.weight")};
    const auto add = [&](ParameterSpec spec) -> ParameterSpec& { return specs.emplace_back(std::move(spec)); };
    if (c.query_rank > 0) {
      add(matrix(own + "q_a", {c.query_rank, hidden}, attention + "q_a_proj.weight"));
      add(norm(own + "q_a_norm", c.query_rank, attention + "q_a_layernorm.weight"));
      add(matrix(own + "q_b", {q_rows, c.query_rank}, attention + "q_b_proj.weight"));
    } else {
      add(matrix(own + "q", {q_rows, hidden}, attention + "q_proj.weight"));
    }
    add(matrix(own + "kv_a", {c.latent_rank + c.rope_size, hidden}, attention + "kv_a_proj_with_mqa.weight"));
    add(norm(own + "kv_a_norm", c.latent_rank, attention + "kv_a_layernorm.weight"));
    add(matrix(own + "kv_b", {c.heads * (c.nope_size + c.value_size), c.latent_rank}, attention + "kv_b_proj.weight"))
        .parts[0]
        .turns = {c.nope_size * c.latent_rank, c.value_size * c.latent_rank};
    add(matrix(own + "output", {hidden, c.heads * c.value_size}, attention + "o_proj.weight"));
    add(norm(own + "post_norm", hidden, hub + "post_attention_layernorm.weight"));
    add_mlp(specs, own + "mlp.", {hub + (c.dense(layer) ? "mlp." : "mlp.shared_experts.")}, c.mlp_inner(layer), false);
    if (c.dense(layer)) return specs;
    add(matrix(own + "router", {c.shape.experts, hidden}, hub + "mlp.gate.weight"));
    specs.back().rule = UpdateRule::kAdamW;
    std::vector<std::string> experts;
    for (int64_t e = 0; e < c.shape.experts; ++e) experts.push_back(fmt::format("{}mlp.experts.{}.", hub, e));
    add_mlp(specs, own + "experts.", experts, c.expert_inner, true);
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
      rope_ = make_rope_table(config_.rope.frequencies, config_.shape.max_position, config_.rope.table_scale, device);
    }
    return std::make_unique<DeepseekLayer>(config_, layer, table, rope_);
  }

  at::Tensor final_norm(const at::Tensor& hidden, const ParameterTable& table) const override {
    return rms_norm(hidden, table.at("final_norm"), config_.shape.rms_norm_eps);
  }

  double forward_flops_per_token(int64_t seq_len) const override {
    const DeepseekConfig& c = config_;
    double products = static_cast<double>(c.shape.vocab * c.shape.hidden);  // the head's
    for (int64_t layer = 0; layer < c.shape.layers; ++layer) {
      for (const ParameterSpec& spec : layer_specs(layer)) {
        double elements = spec.shape.size() > 1 ? 1 : 0;
        for (const int64_t size : spec.shape) elements *= static_cast<double>(size);
        products += spec.expert ? elements * static_cast<double>(c.shape.top_k) / static_cast<double>(c.shape.experts)
                                : elements;
      }
    }
    const double scores = 1.0 * c.shape.layers * c.heads * (c.key_size() + c.value_size) * seq_len;
    return 2 * products + scores;  // QKᵀ and PV, half of each
  }

  ActivationBytes activation_bytes(int64_t layer, int64_t element) const override {
    const DeepseekConfig& c = config_;
    const int64_t hidden = c.shape.hidden, keys = c.heads * c.key_size(), values = c.heads * c.value_size;
    const int64_t experts = c.dense(layer) ? 0 : c.shape.experts, inner = c.expert_inner, mlp = c.mlp_inner(layer);
    ActivationBytes bytes;
    // Input, normed, residual, normed again; latents before and after their norms; q, k, v and what attention gave;
    // gate and up and activated. In fp32 its log-sum-exp, the router's logits and theirs, experts and weights.
    bytes.token = element * (4 * hidden + 2 * (c.query_rank + c.latent_rank) + 2 * keys + 2 * values + 3 * mlp) +
                  4 * (c.heads + (experts > 0 ? experts + 1 + 2 * c.shape.top_k : 0));
    bytes.token_cheap = element * (hidden + mlp);
    bytes.token_backward = element * (std::max(2 * (2 * keys + values), 3 * mlp) + 4 * hidden + 2 * experts);
    bytes.token_ring = 4 * (keys + 2 * values + 3 * (keys + values));  // fp32: of queries, a sum, three keys and values
    if (experts == 0) return bytes;
    bytes.expert_row = element * (hidden + 2 * inner + inner) + 4;  // row, gate and up, activated, weight
    bytes.expert_row_cheap = element * (hidden + inner);
    // The gradient of the result, and then those of activated, gate and up, or that of the row.
    bytes.expert_row_backward = element * (hidden + std::max(hidden, 3 * inner));
    return bytes;
  }

 private:
  ParameterSpec matrix(std::string name, std::vector<int64_t> shape, std::string hub_name) const {
    return matrix_spec(std::move(name), std::move(shape), std::move(hub_name), config_.shape.initializer_range);
  }

  void add_mlp(std::vector<ParameterSpec>& specs, const std::string& own, const std::vector<std::string>& hubs,
               int64_t inner, bool expert) const {
    add_mlp_specs(specs, own, hubs, config_.shape.hidden, inner, expert, config_.shape.initializer_range);
  }

  static ParameterSpec norm(std::string name, int64_t size, std::string hub_name) {
    return constant_spec(std::move(name), {size}, std::move(hub_name), 1);
  }

  DeepseekConfig config_;
  mutable RopeTable rope_;  // made once, shared by the layers
};

// What says what RoPE does: rope_parameters, or rope_scaling of old beside rope_theta; none: nothing special.
std::optional<Json> rope_object(const Json& config) {
  const bool current = given(config, "rope_parameters"), old = given(config, "rope_scaling");
  if (!current) return old ? std::optional(config.at("rope_scaling")) : std::nullopt;
  const Json rope = config.at("rope_parameters");
  if (!old) return rope;
  for (const auto& [key, value] : config.at("rope_scaling").items()) {  // an export has both
    const std::string here = key == "type" ? "rope_type" : key;
    if (here != "rope_theta" && (!rope.has(here) || rope.at(here).dump() != value.dump())) {
      refuse(value, "the same as in rope_parameters");
    }
  }
  return rope;
}

double read_rope_theta(const Json& config, const std::optional<Json>& rope) {
  const bool inside = rope && rope->has("rope_theta");
  const double theta = (inside ? *rope : config).at("rope_theta").as_double();
  if (config.has("rope_theta") && config.at("rope_theta").as_double() != theta) {
    refuse(config.at("rope_theta"), rope->at("rope_theta").dump() + ", as in rope_parameters");
  }
  check_within(config, "rope_theta", theta, 1 + 1e-9, 1e12);
  return theta;
}

}  // namespace

DeepseekRope read_deepseek_rope(const Json& config) {
  const std::optional<Json> scaling = rope_object(config);
  const double theta = read_rope_theta(config, scaling);
  const int64_t size = size_of(config, "qk_rope_head_dim");
  DeepseekRope rope{rope_inverse_frequencies(theta, size)};
  if (!scaling) return rope;
  const char* type_key = scaling->has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling->string_or(type_key, "default");
  if (type != "default" && type != "yarn") refuse(scaling->at(type_key), "\"default\" or \"yarn\"");
  std::set<std::string, std::less<>> known{"rope_type", "type", "rope_theta"};
  if (type == "yarn") {
    known.insert({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"});
  }
  for (const auto& [key, value] : scaling->items()) {
    if (known.contains(key) || value.is_null()) continue;
    value.fail("this option of RoPE is not supported for this family", Fix("remove it, if the weights allow"));
  }
  if (type == "default") return rope;
  const double factor = scaling->at("factor").as_double();
  const double length = scaling->at("original_max_position_embeddings").as_double();
  check_within(*scaling, "factor", factor, 1, 1e6);
  check_within(*scaling, "original_max_position_embeddings", length, 1, 1 << 30);
  YarnScaling yarn{factor, length, scaling->double_or("beta_fast", 32), scaling->double_or("beta_slow", 1)};
  check_within(*scaling, "beta_fast", yarn.beta_fast, 1e-6, 1e6);
  check_within(*scaling, "beta_slow", yarn.beta_slow, 1e-6, 1e6);
  rope.frequencies = yarn_inverse_frequencies(theta, size, yarn);
  const double mscale = scaling->double_or("mscale", 0), all_dim = scaling->double_or("mscale_all_dim", 0);
  check_within(*scaling, "mscale", mscale, 0, 1e3);
  check_within(*scaling, "mscale_all_dim", all_dim, 0, 1e3);
  const auto m = [&](double x) { return 0.1 * x * std::log(factor) + 1; };
  const bool both = mscale > 0 && all_dim > 0, plain = all_dim == 0 && (mscale == 0 || mscale == 1);
  if (!both && !plain) {  // readers differ on what the missing one is
    scaling->fail(fmt::format("mscale {} with mscale_all_dim {}: both or none are supported", mscale, all_dim),
                  Fix("set both, as the published models do"));
  }
  rope.table_scale = both ? m(mscale) / m(all_dim) : m(1);
  if (both) rope.softmax_scale = m(all_dim) * m(all_dim);
  return rope;
}

std::unique_ptr<MoeModel> open_deepseek_v2(const Json& config) {
  return std::make_unique<DeepseekV2>(read_config(config));
}

}  // namespace marrow
