// DeepSeek-V2, V2-Lite and V3 (also Moonlight): latent attention, shared experts, first layers dense. V2 routes by
// softmax, V3 by sigmoid scores with a bias of selection.
#include "models/config_fields.h"
#include "models/families.h"
#include "models/family_specs.h"
#include "models/layer_operators.h"
#include "ops/cuda_kernels.h"
#include "ops/linear.h"
#include "ops/mla_rope.h"
#include "ops/rms_norm.h"
#include "ops/rows.h"

namespace marrow {
namespace {

constexpr double kLatentEps = 1e-6;  // of the norms on latents, whatever rms_norm_eps says

struct DeepseekConfig {
  ModelShape shape;
  RouterOptions routing;
  double score_scale = 1;    // YaRN's, beside 1/√(Dn + Dr)
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

void refuse_unsupported(const Json& config) {
  check_is(config, "attention_bias", "false");
  check_is(config, "mlp_bias", "false");
  check_is(config, "moe_layer_freq", "1");
  check_is(config, "rope_interleave", "true");
  check_is(config, "scoring_func", is_v3(config) ? "\"sigmoid\"" : "\"softmax\"");
  check_is(config, "partial_rotary_factor", "1");
  check_is(config, "num_key_value_heads", json_text(size_of(config, "num_attention_heads")));
  check_is(config, "head_dim", config.at("qk_rope_head_dim").dump());
  check_is(config, "qk_head_dim",
           json_text(config.at("qk_nope_head_dim").as_int() + config.at("qk_rope_head_dim").as_int()));
  if (is_v3(config)) check_is(config, "topk_method", "\"noaux_tc\"");
  if (!is_v3(config)) check_is(config, "norm_topk_prob", "false");  // the reference ignores it
  refuse_quantised(config);
}

RouterOptions read_routing(const Json& config, int64_t experts) {
  RouterOptions routing;
  routing.top_k = size_of(config, "num_experts_per_tok", kRouterMaxTopK);
  routing.scale = config.at("routed_scaling_factor").as_double();
  check_within(config, "routed_scaling_factor", routing.scale, 1e-6, 1e6);
  routing.sigmoid = is_v3(config);
  routing.normalize = is_v3(config) && config.at("norm_topk_prob").as_bool();
  const std::string method = is_v3(config) ? "noaux_tc" : config.at("topk_method").as_string();
  if (method != "greedy") {
    if (method != "group_limited_greedy" && !is_v3(config)) {
      refuse(config.at("topk_method"), "\"greedy\" or \"group_limited_greedy\"");
    }
    routing.expert_groups = size_of(config, "n_group", kRouterMaxExpertGroups);
    routing.top_groups = size_of(config, "topk_group");
  }
  const int64_t groups = routing.expert_groups;
  if (experts % groups != 0) refuse(config.at("n_group"), fmt::format("a divisor of the {} experts", experts));
  if (routing.sigmoid && groups > 1 && groups > experts / 2) {  // a group's score is that of its two best
    refuse(config.at("n_group"), fmt::format("at most {}, half of the experts", experts / 2));
  }
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
  c.shape = read_shape(config);
  c.shape.dense_layers = size_of(config, "first_k_dense_replace", 1 << 24, 0);
  if (c.shape.moe_layers() < 1) {
    refuse(config.at("first_k_dense_replace"), fmt::format("less than num_hidden_layers = {}", c.shape.layers));
  }
  c.shape.experts = size_of(config, "n_routed_experts", kRouterMaxExperts);
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
    check_even(config, key, config.at(key).as_int());
  }
  c.dense_inner = c.shape.dense_layers > 0 ? size_of(config, "intermediate_size") : 0;
  c.expert_inner = size_of(config, "moe_intermediate_size");
  c.shared_inner = c.expert_inner * size_of(config, "n_shared_experts");
  const DeepseekRope rope = read_deepseek_rope(config);
  c.shape.rope_frequencies = rope.frequencies;
  c.shape.rope_scale = rope.table_scale;
  c.score_scale = rope.softmax_scale;
  return c;
}

class DeepseekLayer final : public DecoderLayer {
 public:
  DeepseekLayer(const DeepseekConfig& config, int64_t layer, const ParameterTable& table)
      : config_(config), layer_(layer), of_{table, layer} {}

  RoutedTokens attend_and_route(const at::Tensor& hidden, const LayerContext& context) const override {
    WeightGradQueue& queue = *context.weight_grads;
    const double eps = config_.shape.rms_norm_eps;
    const at::Tensor normed = cheap(context, [=, this] { return rms_norm(hidden, input_norm_, eps); });
    at::Tensor query = normed;
    if (config_.query_rank > 0) query = rms_norm(linear(normed, query_down_, queue), query_norm_, kLatentEps);
    query = linear(query, query_, queue);
    const auto parts =
        linear(normed, latent_down_, queue).split_with_sizes({config_.latent_rank, config_.rope_size}, 1);
    const at::Tensor latent = linear(rms_norm(parts[0], latent_norm_, kLatentEps), latent_up_, queue);
    const auto [q, k, v] =
        mla_rope(query, latent, parts[1], context.rope, context.positions, config_.heads, config_.value_size);
    const double scale = config_.score_scale / std::sqrt(static_cast<double>(config_.key_size()));
    const at::Tensor attended = attend(context, layer_, q, k, v, scale).flatten(1);
    auto [residual, post] = add_rms_norm(linear(attended, output_, queue), hidden, post_norm_, eps);
    if (config_.dense(layer_)) return {residual, post, {}};
    return {residual, post, route(context, post, router_, config_.routing)};
  }

  const Parameter& first_expert_weight() const override { return gate_up_; }

  ExpertRows run_experts(const ExpertRows& rows, const at::Tensor& row_weights,
                         const LayerContext& context) const override {
    return swiglu_experts(context, rows, row_weights, gate_up_, down_);
  }

  // The shared experts, or a dense layer's only ones, read what the router read.
  at::Tensor combine_and_add(const at::Tensor& residual, const at::Tensor& normed, const ExpertRows& rows,
                             const RowMap& map, const LayerContext& context) const override {
    const at::Tensor sum = residual + swiglu_mlp(context, normed, mlp_gate_up_, mlp_down_);
    return config_.dense(layer_) ? sum : sum_rows(rows, map, sum);
  }

 private:
  DeepseekConfig config_;
  int64_t layer_;
  LayerParameters of_;
  Parameter input_norm_ = of_("input_norm");                     // [H]
  Parameter query_down_ = of_.if_any("q_a");                     // [Lq, H]
  Parameter query_norm_ = of_.if_any("q_a_norm");                // [Lq]
  Parameter query_ = of_(config_.query_rank > 0 ? "q_b" : "q");  // [Hq·(Dn + Dr), Lq or H]
  Parameter latent_down_ = of_("kv_a");                          // [Lkv + Dr, H]
  Parameter latent_norm_ = of_("kv_a_norm");                     // [Lkv]
  Parameter latent_up_ = of_("kv_b");                            // [Hq·(Dn + Dv), Lkv]
  Parameter output_ = of_("output");                             // [H, Hq·Dv]
  Parameter post_norm_ = of_("post_norm");                       // [H]
  Parameter mlp_gate_up_ = of_("mlp.gate_up");                   // [2I, H]
  Parameter mlp_down_ = of_("mlp.down");                         // [H, I]
  Parameter router_ = of_.if_any("router");                      // [E, H]
  Parameter gate_up_ = of_.if_any("experts.gate_up");            // [E, 2I, H], each expert's gate before its up
  Parameter down_ = of_.if_any("experts.down");                  // [E, H, I]
};

class DeepseekV2 final : public MoeModel {
 public:
  explicit DeepseekV2(DeepseekConfig config) : config_(std::move(config)) {}

  const ModelShape& shape() const override { return config_.shape; }

  std::vector<ParameterSpec> layer_specs(int64_t layer) const override {
    const DeepseekConfig& c = config_;
    const int64_t hidden = c.shape.hidden, q_rows = c.heads * c.key_size();
    LayerSpecs specs(c.shape, layer);
    specs.norm("input_norm", hidden, "input_layernorm.weight");
    if (c.query_rank > 0) {
      specs.matrix("q_a", {c.query_rank, hidden}, "self_attn.q_a_proj.weight");
      specs.norm("q_a_norm", c.query_rank, "self_attn.q_a_layernorm.weight");
      specs.matrix("q_b", {q_rows, c.query_rank}, "self_attn.q_b_proj.weight");
    } else {
      specs.matrix("q", {q_rows, hidden}, "self_attn.q_proj.weight");
    }
    specs.matrix("kv_a", {c.latent_rank + c.rope_size, hidden}, "self_attn.kv_a_proj_with_mqa.weight");
    specs.norm("kv_a_norm", c.latent_rank, "self_attn.kv_a_layernorm.weight");
    specs.matrix("kv_b", {c.heads * (c.nope_size + c.value_size), c.latent_rank}, "self_attn.kv_b_proj.weight")
        .parts[0]
        .turns = {c.nope_size * c.latent_rank, c.value_size * c.latent_rank};
    specs.matrix("output", {hidden, c.heads * c.value_size}, "self_attn.o_proj.weight");
    specs.norm("post_norm", hidden, "post_attention_layernorm.weight");
    specs.mlp("mlp", c.dense(layer) ? "mlp" : "mlp.shared_experts", c.mlp_inner(layer));
    if (c.dense(layer)) return specs.take();
    specs.matrix("router", {c.shape.experts, hidden}, "mlp.gate.weight", UpdateRule::kAdamW);
    specs.experts("mlp.experts", c.expert_inner);
    return specs.take();
  }

  std::unique_ptr<DecoderLayer> make_layer(int64_t layer, const ParameterTable& table) const override {
    return std::make_unique<DeepseekLayer>(config_, layer, table);
  }

  double mixing_flops_per_token(int64_t seq_len) const override {
    const DeepseekConfig& c = config_;
    return 1.0 * c.shape.layers * c.heads * (c.key_size() + c.value_size) * seq_len;  // QKᵀ and PV, half of each
  }

  ActivationBytes activation_bytes(int64_t layer, int64_t element) const override {
    const DeepseekConfig& c = config_;
    const int64_t hidden = c.shape.hidden, keys = c.heads * c.key_size(), values = c.heads * c.value_size;
    const int64_t experts = c.dense(layer) ? 0 : c.shape.experts, mlp = c.mlp_inner(layer);
    ActivationBytes bytes;
    // Input, normed, residual, normed again; latents before and after their norms; q, k, v and what attention gave;
    // gate and up and activated. In fp32 its log-sum-exp, the router's logits and theirs, experts and weights.
    bytes.token = element * (4 * hidden + 2 * (c.query_rank + c.latent_rank) + 2 * keys + 2 * values + 3 * mlp) +
                  4 * (c.heads + (experts > 0 ? experts + 1 + 2 * c.shape.top_k : 0));
    bytes.token_cheap = element * (hidden + mlp);
    bytes.token_backward = element * (std::max(2 * (2 * keys + values), 3 * mlp) + 4 * hidden + 2 * experts);
    bytes.token_ring = 4 * (keys + 2 * values + 3 * (keys + values));  // fp32: of queries, a sum, three keys and values
    if (experts > 0) count_swiglu_experts(bytes, element, hidden, c.expert_inner);
    return bytes;
  }

 private:
  DeepseekConfig config_;
};

}  // namespace

DeepseekRope read_deepseek_rope(const Json& config) {
  const Json scaling = rope_parameters(config);
  const double theta = scaling.at("rope_theta").as_double();
  check_within(config, "rope_theta", theta, 1 + 1e-9, 1e12);
  const int64_t size = size_of(config, "qk_rope_head_dim");
  DeepseekRope rope{rope_inverse_frequencies(theta, size)};
  if (scaling.string_or("rope_type", "default") == "default") {
    check_known(scaling, {"rope_type", "rope_theta"});
    return rope;
  }
  check_is(scaling, "rope_type", "\"yarn\"");
  check_known(scaling, {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast",
                        "beta_slow", "mscale", "mscale_all_dim"});
  const YarnScaling yarn = read_yarn(scaling);
  rope.frequencies = yarn_inverse_frequencies(theta, size, yarn);
  const double mscale = scaling.double_or("mscale", 0), all_dim = scaling.double_or("mscale_all_dim", 0);
  check_within(scaling, "mscale", mscale, 0, 1e3);
  check_within(scaling, "mscale_all_dim", all_dim, 0, 1e3);
  const bool both = mscale > 0 && all_dim > 0, plain = all_dim == 0 && (mscale == 0 || mscale == 1);
  if (!both && !plain) {  // readers differ on what the missing one is
    scaling.fail(fmt::format("mscale {} with mscale_all_dim {}: both or none are supported", mscale, all_dim),
                 Fix("set both, as the published models do"));
  }
  if (!both) {
    rope.table_scale = yarn_magnitude(yarn, 1);
    return rope;
  }
  const double of_all = yarn_magnitude(yarn, all_dim);
  rope.table_scale = yarn_magnitude(yarn, mscale) / of_all;
  rope.softmax_scale = of_all * of_all;
  return rope;
}

std::unique_ptr<MoeModel> open_deepseek_v2(const Json& config) {
  return std::make_unique<DeepseekV2>(read_config(config));
}

}  // namespace marrow
