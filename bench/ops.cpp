// Speed of every operator: time, GB/s of the bytes that must move or TFLOP/s, and on a GPU the percentage of an H200's
// limit. GPU sizes are those of Qwen3-30B-A3B with 16,384 tokens, bf16; CPU sizes those of a toy (2,048 tokens, hidden
// 256, fp32). Forward, input gradient and weight gradient apart where an operator has them apart.
//   build-gpu/bench_ops [--benchmark_filter=attention]
//   build-gpu/bench_ops fp8_bounds: from which sizes on products are faster in fp8, for the table in fp8_quantize.cpp
#include "ops/pch.h"
// After the precompiled header:
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/autograd.h>

#include "fp8_bounds.h"
#include "measure.h"
#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/expert_rows.h"
#include "ops/gated_delta_rule.h"
#include "ops/gated_rms_norm.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/linear_cross_entropy.h"
#include "ops/mla_rope.h"
#include "ops/optimizer.h"
#include "ops/philox_normal.h"
#include "ops/qk_norm_rope.h"
#include "ops/rms_norm.h"
#include "ops/router.h"
#include "ops/rows.h"
#include "ops/short_convolution.h"
#include "ops/swiglu.h"

namespace marrow {
namespace {

using at::Tensor;

constexpr double kBytesPerSecond = 4.8e12, kFlopPerSecond = 989e12;  // an H200's

enum class Unit { kBytes, kFlops };

// `work` is bytes or FLOPs of a call. `prepare` runs as often as `body`, before it and untimed.
void measure(
    benchmark::State& state, Unit unit, double work, const Body& body, const Body& prepare = [] {}) {
  const auto round = [&] {
    for (int i = 0; i < kRepeats; ++i) prepare();
    return seconds_of(body) / kRepeats;
  };
  round();
  double seconds = 0, rounds = 0;
  for (auto _ : state) {
    (void)_;
    const double elapsed = round();
    state.SetIterationTime(elapsed);
    seconds += elapsed;
    rounds += 1;
  }
  const bool bytes = unit == Unit::kBytes;
  const double rate = work * rounds / seconds;
  state.counters[bytes ? "GB/s" : "TFLOP/s"] = rate * (bytes ? 1e-9 : 1e-12);
  if (sizes().device.is_cuda()) state.counters["percent"] = 100 * rate / (bytes ? kBytesPerSecond : kFlopPerSecond);
}

// The gradient of the leaves behind `outputs`, from a kept graph.
Body backward_of(const std::vector<Tensor>& outputs, const std::vector<Tensor>& leaves) {
  std::vector<Tensor> gradients;
  for (const Tensor& output : outputs) gradients.push_back(at::randn(output.sizes(), output.options()));
  return [=] {
    for (const Tensor& leaf : leaves) leaf.mutable_grad() = Tensor();
    torch::autograd::backward(outputs, gradients, /*retain_graph=*/true);
  };
}

Body backward_into(const std::vector<Tensor>& outputs, const std::vector<Tensor>& leaves, WeightGradQueue& queue) {
  return [&queue, run = backward_of(outputs, leaves)] {
    run();
    queue.run_all();
  };
}

void philox(benchmark::State& state) {
  const Sizes s = sizes();
  Tensor out = s.random({s.vocabulary, s.hidden});
  measure(state, Unit::kBytes, static_cast<double>(out.nbytes()), [&] { philox_normal(out, 1, "embedding", 0, 0.02); });
}

void norm(benchmark::State& state, bool backward) {
  const Sizes s = sizes();
  const Tensor x = s.leaf({s.tokens(), s.hidden}), residual = s.random({s.tokens(), s.hidden});
  const Parameter weight = s.parameter({s.hidden});
  if (backward) {
    const auto [sum, normed] = add_rms_norm(x, residual, weight, 1e-6);
    return measure(state, Unit::kBytes, 4 * s.token_bytes(), backward_of({sum, normed}, {x}));
  }
  const at::NoGradGuard no_grad;
  measure(state, Unit::kBytes, 4 * s.token_bytes(), [&] { add_rms_norm(x, residual, weight, 1e-6); });
}

void rope(benchmark::State& state, bool backward) {
  const Sizes s = sizes();
  const Parameter q_norm = s.parameter({s.head_size}), k_norm = s.parameter({s.head_size});
  const RopeTable table = make_rope_table(rope_inverse_frequencies(1e6, s.head_size), s.seq_len, 1.0, s.device);
  const Tensor positions =
      at::arange(s.tokens(), at::device(s.device).dtype(at::kInt)).remainder(s.seq_len).to(at::kInt);
  const Tensor qkv = s.leaf({s.tokens(), s.qkv()});
  const auto run = [&] { return qk_norm_rope(qkv, q_norm, k_norm, table, positions, s.q_heads, s.kv_heads, 1e-6); };
  const double bytes = static_cast<double>(s.tokens() * s.head_size) * s.element();
  const double heads = static_cast<double>(s.q_heads + s.kv_heads);
  if (backward) {
    const auto [q, k, v] = run();
    return measure(state, Unit::kBytes, (3 * heads + 2 * static_cast<double>(s.kv_heads)) * bytes,
                   backward_of({q, k, v}, {qkv}));
  }
  const at::NoGradGuard no_grad;
  measure(state, Unit::kBytes, 2 * heads * bytes, run);
}

// As DeepSeek-V3 on a GPU.
void latent_rope(benchmark::State& state, bool backward) {
  const Sizes s = sizes();
  const int64_t heads = s.device.is_cuda() ? 128 : s.q_heads, nope = 128, rope = 64, value = 128;
  const RopeTable table = make_rope_table(rope_inverse_frequencies(1e4, rope), s.seq_len, 1.0, s.device);
  const Tensor positions =
      at::arange(s.tokens(), at::device(s.device).dtype(at::kInt)).remainder(s.seq_len).to(at::kInt);
  const Tensor q = s.leaf({s.tokens(), heads * (nope + rope)}), kv = s.leaf({s.tokens(), heads * (nope + value)}),
               k_rope = s.leaf({s.tokens(), rope});
  const auto run = [&] { return mla_rope(q, kv, k_rope, table, positions, heads, value); };
  // q, k with k_rope's part in every head, and v.
  const double bytes = static_cast<double>(s.tokens()) * s.element() *
                       static_cast<double>(heads * (2 * (nope + rope) + 2 * (nope + value) + rope) + rope);
  if (backward) {
    const auto [q_out, k_out, v_out] = run();
    return measure(state, Unit::kBytes, bytes, backward_of({q_out, k_out, v_out}, {q, kv, k_rope}));
  }
  const at::NoGradGuard no_grad;
  measure(state, Unit::kBytes, bytes, run);
}

void attend(benchmark::State& state, bool backward, bool deterministic, bool documents) {
  const Sizes s = sizes();
  // Queries and keys have 1 as their mean square, as QK-norm leaves them: what a product's data are decides its power.
  const auto normed = [&](int64_t heads) {
    return at::randn({s.tokens(), heads, s.head_size}, at::device(s.device)).to(s.dtype).set_requires_grad(true);
  };
  const Tensor q = normed(s.q_heads), k = normed(s.kv_heads), v = s.leaf({s.tokens(), s.kv_heads, s.head_size});
  AttentionLayout layout{s.sequences, s.seq_len, {}, 0};
  const int64_t length = s.seq_len / (documents ? 4 : 1);
  for (int64_t t = 0; documents && t <= s.tokens(); t += length) {
    layout.document_offsets.push_back(static_cast<int32_t>(t));
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(s.head_size));
  const double flops = 2.0 * static_cast<double>(s.tokens() * length * s.q_heads * s.head_size);
  if (backward) {
    return measure(state, Unit::kFlops, 2.5 * flops,
                   backward_of({attention(q, k, v, layout, scale, deterministic)}, {q, k, v}));
  }
  const at::NoGradGuard no_grad;
  measure(state, Unit::kFlops, flops, [&] { attention(q, k, v, layout, scale, deterministic); });
}

// As Qwen3.5-35B-A3B on a GPU: half as many key heads as value heads, convolved with the values.
struct DeltaSizes {
  Sizes s = sizes();
  int64_t value_heads = s.q_heads, key_heads = s.q_heads / 2, size = s.head_size;

  Tensor starts() const { return at::arange(s.sequences + 1, at::device(s.device)).mul_(s.seq_len).to(at::kInt); }
  Tensor heads(int64_t count) const { return s.leaf({s.tokens(), count, size}); }
};

// FLOPs of the chunked form with chunks of 64, all products as whole squares.
void delta_rule(benchmark::State& state, bool backward) {
  const DeltaSizes d;
  const Tensor q = d.heads(d.key_heads), k = d.heads(d.key_heads), v = d.heads(d.value_heads), starts = d.starts();
  const auto gates = at::device(d.s.device);
  const Tensor g = at::rand({d.s.tokens(), d.value_heads}, gates).mul_(-0.1).set_requires_grad(true);
  const Tensor beta = at::rand({d.s.tokens(), d.value_heads}, gates).set_requires_grad(true);
  const auto run = [&] { return gated_delta_rule(q, k, v, g, beta, starts); };
  const double square = 2.0 * static_cast<double>(d.s.tokens() * d.value_heads * d.size);  // · Dv or the chunk
  const double forward = square * (5.0 * 64 + 3.0 * static_cast<double>(d.size));
  if (backward) {
    return measure(state, Unit::kFlops, square * (12.0 * 64 + 8.0 * static_cast<double>(d.size)),
                   backward_of({run().out}, {q, k, v, g, beta}));
  }
  const at::NoGradGuard no_grad;
  measure(state, Unit::kFlops, forward, run);
}

void convolve(benchmark::State& state, bool backward) {
  const DeltaSizes d;
  const Tensor x = d.s.leaf({d.s.tokens(), (d.value_heads + 2 * d.key_heads) * d.size}), starts = d.starts();
  const Parameter weight = d.s.parameter({x.size(1), 4});
  const auto bytes = static_cast<double>(x.nbytes());
  if (backward) {
    return measure(state, Unit::kBytes, 3 * bytes, backward_of({short_convolution(x, weight, starts)}, {x}));
  }
  const at::NoGradGuard no_grad;
  measure(state, Unit::kBytes, 2 * bytes, [&] { short_convolution(x, weight, starts); });
}

void gated_norm(benchmark::State& state, bool backward) {
  const DeltaSizes d;
  const Tensor x = d.heads(d.value_heads), gate = d.heads(d.value_heads);
  const Parameter weight = d.s.parameter({d.size});
  const auto bytes = static_cast<double>(x.nbytes());
  if (backward) {
    return measure(state, Unit::kBytes, 5 * bytes, backward_of({gated_rms_norm(x, gate, weight, 1e-6)}, {x, gate}));
  }
  const at::NoGradGuard no_grad;
  measure(state, Unit::kBytes, 3 * bytes, [&] { gated_rms_norm(x, gate, weight, 1e-6); });
}

enum class Pass { kForward, kInputGradient, kWeightGradient };

// The three products of a linear map; `run` makes the output from its input, the parameter and a queue. In fp8 the
// weight's copies are there already; forward and input gradient quantise x and dy one way, as "quantize_rows". The
// other way round, which only the weight gradient needs, is in no row: it is what "both ways" takes more.
void products(benchmark::State& state, Pass pass, const Tensor& x, at::IntArrayRef weight_shape, double flops, bool fp8,
              const std::function<Tensor(const Parameter&, WeightGradQueue&)>& run) {
  Parameter weight = sizes().parameter(weight_shape, pass == Pass::kWeightGradient);
  if (fp8) weight.fp8 = std::make_shared<Fp8Weight>(/*at_any_size=*/true);
  WeightGradQueue queue;
  if (pass == Pass::kForward) {
    const at::NoGradGuard no_grad;
    return measure(state, Unit::kFlops, flops, [&] { run(weight, queue); });
  }
  const Body backward = backward_of({run(weight, queue)}, {x});
  if (pass == Pass::kInputGradient) return measure(state, Unit::kFlops, flops, backward);
  measure(
      state, Unit::kFlops, flops, [&] { queue.run_all(); }, backward);  // the first call runs them all
}

void project(benchmark::State& state, Pass pass, int64_t n, int64_t k, bool fp8) {
  const Sizes s = sizes();
  const Tensor x = s.leaf({s.tokens(), k});
  products(state, pass, x, {n, k}, 2.0 * static_cast<double>(s.tokens() * k * n), fp8,
           [&](const Parameter& weight, WeightGradQueue& queue) { return linear(x, weight, queue); });
}

void quantize(benchmark::State& state, bool transposed) {
  const Sizes s = sizes();
  const Tensor x = s.random({s.tokens(), s.hidden});
  measure(state, Unit::kBytes, static_cast<double>(x.numel()) * (s.element() + (transposed ? 2 : 1)),
          [&] { quantize_rows(x, true, transposed); });
}

void quantize_experts(benchmark::State& state) {
  const Sizes s = sizes();
  const Tensor weight = s.random({s.experts, 2 * s.intermediate, s.hidden});
  measure(state, Unit::kBytes, static_cast<double>(weight.numel()) * (s.element() + 2),
          [&] { quantize_weight(weight); });
}

void grouped(benchmark::State& state, Pass pass, bool down, bool even, bool fp8) {
  const Sizes s = sizes();
  const int64_t n = down ? s.hidden : 2 * s.intermediate, k = down ? s.intermediate : s.hidden;
  const ExpertPermutation order = expert_permutation(choose_experts(s, even), s.experts);
  const Tensor rows = s.leaf({s.rows(), k});
  products(state, pass, rows, {s.experts, n, k}, 2.0 * static_cast<double>(s.rows() * n * k), fp8,
           [&](const Parameter& weight, WeightGradQueue& queue) {
             return grouped_linear(rows, weight, order.offsets, queue);
           });
}

void route(benchmark::State& state, bool backward) {
  const Sizes s = sizes();
  const Tensor x = s.leaf({s.tokens(), s.hidden});
  const Parameter weight = s.parameter({s.experts, s.hidden});
  WeightGradQueue queue;
  const auto run = [&] { return router(x, weight, {}, 1, {s.top_k, true, 1.0}, nullptr, queue); };
  const double logits = static_cast<double>(s.tokens() * s.experts) * 4;
  if (backward) {
    return measure(state, Unit::kBytes, 3 * s.token_bytes() + 3 * logits, backward_into({run().weights}, {x}, queue));
  }
  const at::NoGradGuard no_grad;
  measure(state, Unit::kBytes, s.token_bytes() + 3 * logits, run);
}

void permute(benchmark::State& state) {
  const Sizes s = sizes();
  const Tensor experts = choose_experts(s, false);
  measure(state, Unit::kBytes, static_cast<double>(s.rows()) * 20, [&] { expert_permutation(experts, s.experts); });
}

// The kernels that make experts' rows and their form in fp8 at once.
void make_expert_rows_fp8(benchmark::State& state, bool gather, bool backward) {
  const Sizes s = sizes();
  const ExpertPermutation order = expert_permutation(choose_experts(s, false), s.experts);
  const auto in_fp8 = [&](at::IntArrayRef shape) {
    Parameter weight = s.parameter(shape, false);
    weight.fp8 = std::make_shared<Fp8Weight>(/*at_any_size=*/true);
    return weight;
  };
  const Parameter up = in_fp8({s.experts, 2 * s.intermediate, s.hidden}),
                  down = in_fp8({s.experts, s.hidden, s.intermediate});
  if (gather) {
    const at::NoGradGuard no_grad;
    const Tensor x = s.random({s.tokens(), s.hidden});
    return measure(state, Unit::kBytes, s.row_bytes() * (1 + 1 / s.element()) + s.token_bytes(),
                   [&] { gather_expert_rows(x, order, s.rows(), up); });
  }
  const Tensor x = s.leaf({s.rows(), 2 * s.intermediate}), weight = at::rand({s.rows()}, at::device(s.device));
  const ExpertRows gate_up{x, order.offsets, nullptr, make_handover(up, Fp8Product::kExpertInputGrad, x)};
  const auto bytes = static_cast<double>(x.nbytes()), fp8 = static_cast<double>(x.numel());
  if (backward)
    return measure(state, Unit::kBytes, 2.5 * bytes + fp8, backward_of({swiglu(gate_up, weight, down).value}, {x}));
  const at::NoGradGuard no_grad;
  measure(state, Unit::kBytes, 1.5 * bytes + fp8 / 2, [&] { swiglu(gate_up, weight, down); });
}

// One is the other's gradient.
void move_rows(benchmark::State& state, bool sum) {
  const Sizes s = sizes();
  const at::NoGradGuard no_grad;
  const ExpertPermutation order = expert_permutation(choose_experts(s, false), s.experts);
  const Tensor x = s.random({s.tokens(), s.hidden}), rows = s.random({s.rows(), s.hidden});
  if (sum)
    return measure(state, Unit::kBytes, s.row_bytes() + 2 * s.token_bytes(), [&] { sum_rows(rows, order.map, x); });
  measure(state, Unit::kBytes, s.row_bytes() + s.token_bytes(),
          [&] { gather_rows(x, order.map, s.rows(), order.offsets); });
}

void activate(benchmark::State& state, bool backward) {
  const Sizes s = sizes();
  const Tensor x = s.leaf({s.rows(), 2 * s.intermediate});
  const Tensor weight = at::rand({s.rows()}, at::device(s.device)).set_requires_grad(true);
  const auto bytes = static_cast<double>(x.nbytes());
  if (backward) return measure(state, Unit::kBytes, 2.5 * bytes, backward_of({swiglu(x, weight)}, {x, weight}));
  const at::NoGradGuard no_grad;
  measure(state, Unit::kBytes, 1.5 * bytes, [&] { swiglu(x, weight); });
}

Tensor zipf_ids(const Sizes& s) {  // token frequencies as in text
  const Tensor rank = at::rand({s.tokens()}, at::device(s.device)).mul(-1).exp2();
  return rank.pow(std::log2(static_cast<double>(s.vocabulary))).mul(s.vocabulary - 1).to(at::kInt);
}

void embed(benchmark::State& state, bool backward, bool deterministic) {
  const Sizes s = sizes();
  const Parameter weight = s.parameter({s.vocabulary, s.hidden});
  const Tensor ids = zipf_ids(s), d = s.random({s.tokens(), s.hidden});
  if (!backward) return measure(state, Unit::kBytes, 2 * s.token_bytes(), [&] { embedding_forward(ids, weight); });
  measure(state, Unit::kBytes, s.token_bytes() * (1 + 8 / s.element()),
          [&] { embedding_backward(ids, d, weight, deterministic); });
}

void head(benchmark::State& state, bool with_gradient) {
  const Sizes s = sizes();
  const Tensor x = s.random({s.tokens(), s.hidden});
  const Parameter weight = s.parameter({s.vocabulary, s.hidden});
  const Tensor targets = at::randint(s.vocabulary, {s.tokens()}, at::device(s.device).dtype(at::kInt));
  const double flops = (with_gradient ? 6.0 : 2.0) * static_cast<double>(s.tokens() * s.hidden) * s.vocabulary;
  measure(state, Unit::kFlops, flops, [&] { linear_cross_entropy(x, weight, targets, 1e-5, with_gradient); });
}

void adamw(benchmark::State& state, bool bf16) {
  const Sizes s = sizes();
  const bool working_copy = s.dtype == at::kBFloat16;
  const int64_t n = s.optimizer_elements;
  const Tensor master = s.random({n}).to(at::kFloat), grad = s.random({n}).to(at::kFloat);
  const Tensor working = working_copy ? master.to(at::kBFloat16) : Tensor();
  const Tensor m = at::zeros({n}, master.options().dtype(bf16 ? at::kBFloat16 : at::kFloat)), v = at::zeros_like(m);
  const Tensor scale = at::ones({1}, master.options());
  const AdamwStep step{1e-3, 0.9, 0.95, 1e-8, 0.1, 1, true};
  const double bytes = static_cast<double>(n) * (8 + 8 + (bf16 ? 8 : 16) + (working_copy ? 2 : 0));
  measure(state, Unit::kBytes, bytes, [&] { adamw_update(master, working, grad, m, v, scale, step); });
}

void muon(benchmark::State& state) {
  const Sizes s = sizes();
  const std::array<int64_t, 3> shape = {s.experts, s.intermediate, s.hidden};
  const Tensor master = s.random(shape).to(at::kFloat), grad = s.random(shape).to(at::kFloat);
  const Tensor momentum = at::zeros_like(master), scale = at::ones({1}, master.options());
  const auto small = static_cast<double>(std::min(shape[1], shape[2])), large = double(std::max(shape[1], shape[2]));
  const double flops = 5.0 * static_cast<double>(shape[0]) * 2 * (2 * small * small * large + small * small * small);
  measure(state, Unit::kFlops, flops, [&] {
    muon_update(master, {}, grad, momentum, scale, {1e-2, 0.95, 0.1, false});
  });
}

void squares(benchmark::State& state) {
  const Tensor flat = sizes().random({sizes().optimizer_elements}).to(at::kFloat);
  const Tensor total = at::zeros({1}, flat.options().dtype(at::kDouble));
  measure(state, Unit::kBytes, static_cast<double>(flat.nbytes()), [&] { add_sum_of_squares(flat, total); });
}

template <typename Function, typename... Args>
void add(const std::string& name, Function function, Args... args) {
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { function(state, args...); })
      ->UseManualTime()
      ->Iterations(5)
      ->Unit(benchmark::kMicrosecond);
}

void add_products(const std::string& name, const std::function<void(benchmark::State&, Pass)>& function) {
  add(name + " forward", function, Pass::kForward);
  add(name + " input gradient", function, Pass::kInputGradient);
  add(name + " weight gradient", function, Pass::kWeightGradient);
}

}  // namespace
}  // namespace marrow

int main(int argc, char** argv) {
  using namespace marrow;
  using benchmark::State;
  at::set_num_threads(1);
  if (argc > 1 && std::string_view(argv[1]) == "fp8_bounds") return print_fp8_bounds();
  add("embedding forward", embed, false, false);
  add("embedding backward", embed, true, false);
  add("embedding backward deterministic", embed, true, true);
  add("add_rms_norm forward", norm, false);
  add("add_rms_norm backward", norm, true);
  const Sizes s = sizes();
  std::vector<std::tuple<std::string, int64_t, int64_t>> maps = {{"qkv", s.qkv(), s.hidden}};
  for (const int64_t size : {512, 768, 1024, 2048, 4096, 7168}) {  // from which on fp8 wins
    if (s.device.is_cuda()) maps.emplace_back(std::to_string(size), size, size);
  }
  for (const auto& [name, n, k] : maps) {
    for (const bool fp8 : {false, true}) {
      add_products("linear " + name + (fp8 ? " fp8" : ""),
                   [n = n, k = k, fp8](State& state, Pass pass) { project(state, pass, n, k, fp8); });
    }
  }
  add("quantize_rows", quantize, false);
  add("quantize_rows both ways", quantize, true);
  add("quantize_weight experts", quantize_experts);
  add("qk_norm_rope forward", rope, false);
  add("qk_norm_rope backward", rope, true);
  add("mla_rope forward", latent_rope, false);
  add("mla_rope backward", latent_rope, true);
  add("attention forward", attend, false, false, false);
  add("attention backward", attend, true, false, false);
  add("attention forward deterministic", attend, false, true, false);
  add("attention backward deterministic", attend, true, true, false);
  add("attention forward documents", attend, false, false, true);
  add("attention backward documents", attend, true, false, true);
  add("gated_delta_rule forward", delta_rule, false);
  add("gated_delta_rule backward", delta_rule, true);
  add("short_convolution forward", convolve, false);
  add("short_convolution backward", convolve, true);
  add("gated_rms_norm forward", gated_norm, false);
  add("gated_rms_norm backward", gated_norm, true);
  add("router forward", route, false);
  add("router backward", route, true);
  add("expert_permutation", permute);
  add("gather_rows", move_rows, false);
  add("sum_rows", move_rows, true);
  add("gather_rows fp8", make_expert_rows_fp8, true, false);
  add("swiglu forward fp8", make_expert_rows_fp8, false, false);
  add("swiglu backward fp8", make_expert_rows_fp8, false, true);
  for (const bool even : {false, true}) {
    for (const bool down : {false, true}) {
      for (const bool fp8 : {false, true}) {
        add_products(
            std::string("grouped_linear ") + (down ? "down" : "gate_up") + (even ? " even" : "") + (fp8 ? " fp8" : ""),
            [=](State& state, Pass pass) { grouped(state, pass, down, even, fp8); });
      }
    }
  }
  add("swiglu forward", activate, false);
  add("swiglu backward", activate, true);
  add("linear_cross_entropy loss", head, false);
  add("linear_cross_entropy with gradients", head, true);
  add("adamw", adamw, false);
  add("adamw bf16 moments", adamw, true);
  add("muon experts", muon);
  add("sum of squares", squares);
  add("philox_normal", philox);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
