// Qwen3.5-MoE, its language model (model_type qwen3_5_moe_text, or the text_config of a qwen3_5_moe): gated DeltaNet
// layers mixed with gated full attention, a shared expert behind a gate, norms that store how far their factors are
// from 1.
#include "models/config_fields.h"
#include "models/families.h"
#include "models/family_specs.h"
#include "models/key_value_cache.h"
#include "models/layer_operators.h"
#include "ops/gated_rms_norm.h"
#include "ops/linear.h"
#include "ops/op_tools.h"
#include "ops/qk_norm_rope.h"
#include "ops/rms_norm.h"
#include "ops/rows.h"
#include "parallel/context_delta_rule.h"

namespace marrow {
namespace {

constexpr double kCentre = 1;  // what norms add to their weights, all but that of the delta rule's output

struct Qwen35MoeConfig {
  ModelShape shape;
  std::vector<bool> full_attention;  // of each layer; else it is a DeltaNet layer
  int64_t heads = 0;                 // Hq
  int64_t kv_heads = 0;              // Hkv
  int64_t head_size = 0;             // D
  int64_t rotary_size = 0;           // elements of a head that turn
  int64_t key_heads = 0;             // Hk, queries and keys of a DeltaNet layer
  int64_t value_heads = 0;           // Hv
  int64_t key_size = 0;              // Dk
  int64_t value_size = 0;            // Dv
  int64_t kernel = 0;                // K, of the convolution
  int64_t intermediate = 0;          // I, of an expert
  int64_t shared_inner = 0;          // I of the shared expert

  int64_t keys() const { return key_heads * key_size; }
  int64_t values() const { return value_heads * value_size; }
  int64_t channels() const { return 2 * keys() + values(); }  // C, what the convolution sees
};

void read_rope(const Json& config, Qwen35MoeConfig& c) {
  const Json rope = rope_parameters(config);
  check_is(rope, "rope_type", "\"default\"");
  // The last two turn images alone.
  check_known(rope, {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"});
  const double theta = rope.at("rope_theta").as_double();
  check_within(config, "rope_theta", theta, 1 + 1e-9, 1e12);
  // transformers writes 0.25 outside of rope_parameters, whatever stands in there.
  const bool inside = rope.has("partial_rotary_factor");
  const double share = (inside ? rope : config).at("partial_rotary_factor").as_double();
  check_within(config, "partial_rotary_factor", share, 0, 1);
  c.rotary_size = static_cast<int64_t>(static_cast<double>(c.head_size) * share);
  if (c.rotary_size < 2 || c.rotary_size % 2 != 0) {
    config.fail(fmt::format("partial_rotary_factor {} turns {} of the {} elements of a head; RoPE turns pairs", share,
                            c.rotary_size, c.head_size),
                Fix("set partial_rotary_factor so that its product with head_dim is even"));
  }
  c.shape.rope_frequencies = rope_inverse_frequencies(theta, c.rotary_size);
}

std::vector<bool> read_full_attention(const Json& config, int64_t layers) {
  if (given(config, "layer_types")) return read_layer_types(config, layers, "full_attention", "linear_attention");
  const int64_t interval = size_of(config, "full_attention_interval");
  std::vector<bool> full;
  for (int64_t layer = 0; layer < layers; ++layer) full.push_back((layer + 1) % interval == 0);
  return full;
}

Qwen35MoeConfig read_config(const Json& config) {
  check_is(config, "attention_bias", "false");
  check_is(config, "attn_output_gate", "true");
  check_is(config, "norm_topk_prob", "true");
  check_is(config, "decoder_sparse_step", "1");
  check_is(config, "mlp_only_layers", "[]");
  check_is(config, "mamba_ssm_dtype", "\"float32\"");
  refuse_quantised(config);
  Qwen35MoeConfig c;
  c.shape = read_moe_shape(config);
  c.shape.norm_offset = kCentre;
  c.heads = size_of(config, "num_attention_heads");
  c.kv_heads = size_of(config, "num_key_value_heads");
  check_divides(config, "num_attention_heads", "num_key_value_heads");
  c.head_size = size_of(config, "head_dim", 512);
  c.key_heads = size_of(config, "linear_num_key_heads");
  c.value_heads = size_of(config, "linear_num_value_heads");
  check_divides(config, "linear_num_value_heads", "linear_num_key_heads");
  c.key_size = size_of(config, "linear_key_head_dim", 128);
  c.value_size = size_of(config, "linear_value_head_dim", 128);
  c.kernel = size_of(config, "linear_conv_kernel_dim", 4);
  c.intermediate = size_of(config, "moe_intermediate_size");
  c.shared_inner = size_of(config, "shared_expert_intermediate_size");
  c.full_attention = read_full_attention(config, c.shape.layers);
  read_rope(config, c);
  return c;
}

// The logarithm of a state's decay, g = −exp(A_log) · softplus(a + dt_bias), in fp32.
at::Tensor log_decay(const at::Tensor& a,         // [T, Hv]
                     const Parameter& a_log,      // [Hv]
                     const Parameter& dt_bias) {  // [Hv]
  const at::Tensor rate = a_log.value.to(at::kFloat).exp();
  const at::Tensor x = a.detach().to(at::kFloat) + dt_bias.value.to(at::kFloat);
  const at::Tensor g = at::softplus(x).mul_(rate).neg_();
  return differentiable({a}, {g}, [=, type = a.scalar_type()](const variable_list& d_out) -> variable_list {
    const at::Tensor dx = d_out[0] * x.sigmoid().mul_(rate).neg_();
    if (a_log.grad.defined()) a_log.grad.add_((d_out[0] * g).sum(0));
    if (dt_bias.grad.defined()) dt_bias.grad.add_(dx.sum(0));
    return {dx.to(type)};
  })[0];
}

class Qwen35MoeLayer final : public DecoderLayer {
 public:
  Qwen35MoeLayer(const Qwen35MoeConfig& config, int64_t layer, const ParameterTable& table)
      : config_(config), layer_(layer), of_{table, layer} {}

  RoutedTokens attend_and_route(const at::Tensor& hidden, const LayerContext& context) const override {
    const double eps = config_.shape.rms_norm_eps;
    const at::Tensor normed = cheap(context, [=, this] { return rms_norm(hidden, input_norm_, eps, kCentre); });
    const at::Tensor mixed = config_.full_attention[layer_] ? attend_fully(normed, context) : recur(normed, context);
    const at::Tensor projected = linear(mixed, output_, *context.weight_grads);
    auto [residual, post] = add_rms_norm(projected, hidden, post_norm_, eps, kCentre);
    return {residual, post, route(context, post, router_, {.top_k = config_.shape.top_k})};
  }

  const Parameter& first_expert_weight() const override { return gate_up_; }

  ExpertRows run_experts(const ExpertRows& rows, const at::Tensor& row_weights,
                         const LayerContext& context) const override {
    return swiglu_experts(context, rows, row_weights, gate_up_, down_);
  }

  // The shared expert reads what the router read, and so does the gate before it.
  at::Tensor combine_and_add(const at::Tensor& residual, const at::Tensor& normed, const ExpertRows& rows,
                             const RowMap& map, const LayerContext& context) const override {
    const at::Tensor shared = swiglu_mlp(context, normed, shared_gate_up_, shared_down_);
    const at::Tensor gate = linear(normed, shared_gate_, *context.weight_grads).sigmoid();
    return sum_rows(rows, map, residual + gate * shared);
  }

 private:
  // Gated full attention → [T, Hq·D].
  at::Tensor attend_fully(const at::Tensor& normed, const LayerContext& context) const {
    const Qwen35MoeConfig& c = config_;
    const double eps = c.shape.rms_norm_eps;
    const int64_t kv = c.kv_heads * c.head_size;
    const auto parts =
        linear(normed, input_, *context.weight_grads).split_with_sizes({2 * c.heads * c.head_size, kv, kv}, 1);
    const auto query = parts[0].unflatten(1, {c.heads, 2, c.head_size}).unbind(2);  // q and its gate, by head
    const auto normed_heads = [&](const at::Tensor& heads, const Parameter& norm) {
      return rms_norm(heads.reshape({-1, c.head_size}), norm, eps, kCentre).view({heads.size(0), -1, c.head_size});
    };
    const at::Tensor q = rotate_front(normed_heads(query[0], q_norm_), context.rope, context.positions);
    const at::Tensor k = rotate_front(normed_heads(parts[1], k_norm_), context.rope, context.positions);
    const at::Tensor v = parts[2].unflatten(1, {c.kv_heads, c.head_size});
    const double scale = 1.0 / std::sqrt(static_cast<double>(c.head_size));
    const at::Tensor attended = attend(context, layer_, q, k, v, scale);
    return (attended * query[1].sigmoid()).flatten(1);
  }

  // Gated DeltaNet → [T, Hv·Dv].
  at::Tensor recur(const at::Tensor& normed, const LayerContext& context) const {
    const Qwen35MoeConfig& c = config_;
    const auto parts = linear(normed, input_, *context.weight_grads)
                           .split_with_sizes({c.channels(), c.values(), c.value_heads, c.value_heads}, 1);
    const at::Tensor beta = parts[2].to(at::kFloat).sigmoid(), g = log_decay(parts[3], a_log_, dt_bias_);
    const at::Tensor mixed =
        context.cache != nullptr
            ? context.cache->convolve(layer_, parts[0], convolution_)
            : context_short_convolution(parts[0], convolution_, context.attention, context.context_ring);
    const auto heads = mixed.split_with_sizes({c.keys(), c.keys(), c.values()}, 1);
    const at::Tensor q = heads[0].unflatten(1, {c.key_heads, c.key_size});
    const at::Tensor k = heads[1].unflatten(1, {c.key_heads, c.key_size});
    const at::Tensor v = heads[2].unflatten(1, {c.value_heads, c.value_size});
    const at::Tensor out = context.cache != nullptr
                               ? context.cache->recur(layer_, q, k, v, g, beta)
                               : context_gated_delta_rule(q, k, v, g, beta, context.attention, context.context_ring);
    const at::Tensor gate = parts[1].unflatten(1, {c.value_heads, c.value_size});
    return gated_rms_norm(out, gate, value_norm_, c.shape.rms_norm_eps).flatten(1);
  }

  Qwen35MoeConfig config_;
  int64_t layer_;
  LayerParameters of_;
  Parameter input_norm_ = of_("input_norm");           // [H]
  Parameter input_ = of_("input");                     // [(2·Hq + 2·Hkv)·D, H]: each head's q before its gate, k, v;
                                                       // or [C + Hv·Dv + 2·Hv, H]
  Parameter q_norm_ = of_.if_any("q_norm");            // [D]
  Parameter k_norm_ = of_.if_any("k_norm");            // [D]
  Parameter convolution_ = of_.if_any("convolution");  // [C, K]
  Parameter a_log_ = of_.if_any("a_log");              // [Hv]
  Parameter dt_bias_ = of_.if_any("dt_bias");          // [Hv]
  Parameter value_norm_ = of_.if_any("value_norm");    // [Dv]
  Parameter output_ = of_("output");                   // [H, Hq·D] or [H, Hv·Dv]
  Parameter post_norm_ = of_("post_norm");             // [H]
  Parameter router_ = of_("router");                   // [E, H]
  Parameter shared_gate_ = of_("shared.gate");         // [1, H]
  Parameter shared_gate_up_ = of_("shared.gate_up");   // [2I, H]
  Parameter shared_down_ = of_("shared.down");         // [H, I]
  Parameter gate_up_ = of_("experts.gate_up");         // [E, 2I, H], each expert's gate before its up
  Parameter down_ = of_("experts.down");               // [E, H, I]
};

class Qwen35Moe final : public MoeModel {
 public:
  explicit Qwen35Moe(Qwen35MoeConfig config) : config_(std::move(config)) {}

  const ModelShape& shape() const override { return config_.shape; }

  std::vector<ParameterSpec> layer_specs(int64_t layer) const override {
    const Qwen35MoeConfig& c = config_;
    const int64_t hidden = c.shape.hidden;
    LayerSpecs specs(c.shape, layer);
    specs.norm("input_norm", hidden, "input_layernorm.weight");
    if (c.full_attention[layer]) {
      const int64_t q_rows = c.heads * c.head_size, kv_rows = c.kv_heads * c.head_size;
      specs.stacked("input", {{.name = "self_attn.q_proj.weight",
                               .shape = {2 * q_rows, hidden},
                               .turns = {c.head_size * hidden, c.head_size * hidden}},
                              {"self_attn.k_proj.weight", {kv_rows, hidden}},
                              {"self_attn.v_proj.weight", {kv_rows, hidden}}});
      specs.norm("q_norm", c.head_size, "self_attn.q_norm.weight");
      specs.norm("k_norm", c.head_size, "self_attn.k_norm.weight");
      specs.matrix("output", {hidden, q_rows}, "self_attn.o_proj.weight");
    } else {
      specs.stacked("input", {{.name = "linear_attn.in_proj_qkv.weight",
                               .shape = {c.channels(), hidden},
                               .turns = {c.keys() * hidden, c.keys() * hidden, c.values() * hidden}},
                              {"linear_attn.in_proj_z.weight", {c.values(), hidden}},
                              {"linear_attn.in_proj_b.weight", {c.value_heads, hidden}},
                              {"linear_attn.in_proj_a.weight", {c.value_heads, hidden}}});
      ParameterSpec& convolution =
          specs.matrix("convolution", {c.channels(), c.kernel}, "linear_attn.conv1d.weight", UpdateRule::kAdamW);
      convolution.parts[0].shape = {c.channels(), 1, c.kernel};
      convolution.decay = false;
      specs.constant("a_log", {c.value_heads}, "linear_attn.A_log", 16).init = InitKind::kLogUniform;
      specs.constant("dt_bias", {c.value_heads}, "linear_attn.dt_bias", 1);
      specs.constant("value_norm", {c.value_size}, "linear_attn.norm.weight", 1);
      specs.matrix("output", {hidden, c.values()}, "linear_attn.out_proj.weight");
    }
    specs.norm("post_norm", hidden, "post_attention_layernorm.weight");
    specs.matrix("router", {c.shape.experts, hidden}, "mlp.gate.weight", UpdateRule::kAdamW);
    specs.matrix("shared.gate", {1, hidden}, "mlp.shared_expert_gate.weight", UpdateRule::kAdamW);
    specs.mlp("shared", "mlp.shared_expert", c.shared_inner);
    specs.experts("mlp.experts", c.intermediate);
    return specs.take();
  }

  std::unique_ptr<DecoderLayer> make_layer(int64_t layer, const ParameterTable& table) const override {
    return std::make_unique<Qwen35MoeLayer>(config_, layer, table);
  }

  double mixing_flops_per_token(int64_t seq_len) const override {
    const Qwen35MoeConfig& c = config_;
    const auto full_layers = std::ranges::count(c.full_attention, true);
    const double full = 2.0 * c.heads * c.head_size * seq_len;  // QKᵀ and PV, half of each
    const double delta = 3 * 2 * c.values() * c.key_size;  // a token reads its state by key and query, and adds to it
    return full_layers * full + (c.shape.layers - full_layers) * delta;
  }

  ActivationBytes activation_bytes(int64_t layer, int64_t element) const override {
    const Qwen35MoeConfig& c = config_;
    const int64_t hidden = c.shape.hidden, experts = c.shape.experts, shared = c.shared_inner;
    ActivationBytes bytes;
    // Input, normed, residual, normed again; gate and up of the shared expert, activated, and its result. In fp32 the
    // router's logits and their log-sum-exp, experts and weights.
    bytes.token = element * (5 * hidden + 3 * shared) + 4 * (experts + 1 + 2 * c.shape.top_k);
    bytes.token_cheap = element * (hidden + shared);
    bytes.token_backward = element * (4 * hidden + 2 * experts);
    if (c.full_attention[layer]) {
      const int64_t q = c.heads * c.head_size, kv = c.kv_heads * c.head_size;
      // What the product gave (v and the gates are in it); q and k by themselves, normed, and turned; what attention
      // gave, the gates' sigmoids, and their product.
      bytes.token += element * ((2 * q + 2 * kv) + 2 * (q + kv) + 3 * q) + 4 * (c.heads + c.rotary_size);
      bytes.token_backward += element * 2 * (2 * q + 2 * kv);
      bytes.token_ring = 4 * (2 * q + 3 * 2 * kv);  // fp32: a sum and a part of it, three keys and values
    } else {
      const int64_t mixed = c.channels(), values = c.values();
      // The convolution's input and result; gates, what the rule gave, its norm. In fp32 what decays and betas need.
      bytes.token += element * (2 * mixed + 3 * values) + 4 * 6 * c.value_heads;
      // Gradients of both, and by chunks of 64 tokens three rows of keys or values, a triangle, two states.
      const int64_t size = std::max(c.key_size, c.value_size);
      bytes.token_backward += element * (2 * (mixed + values) + c.value_heads * (3 * size + 64 + 2 * size * size / 64));
      // A second run of the rule, with keys in place of values: these and its result stay, as does what each chunk
      // makes of a state, and its own. Of the backward the gradients of both runs.
      const int64_t keys = c.value_heads * c.key_size;
      bytes.token_ring_kept = element * 2 * keys;
      bytes.chunk_ring_kept = 4 * keys * (2 * c.key_size + 2 * c.value_size);
      bytes.token_ring = element * (4 * keys + 2 * values);
    }
    count_swiglu_experts(bytes, element, hidden, c.intermediate);
    return bytes;
  }

 private:
  Qwen35MoeConfig config_;
};

}  // namespace

std::unique_ptr<MoeModel> open_qwen3_5_moe(const Json& config) {
  return std::make_unique<Qwen35Moe>(read_config(config));
}

}  // namespace marrow
