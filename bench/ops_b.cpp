// Operators around the experts, the loss and the optimizer: time, GB/s or TFLOP/s. On the CPU the
// sizes of a small model (2,048 tokens), on the GPU those of Qwen3-30B-A3B (32,768 tokens).
#include "ops/pch.h"
// After the precompiled header:
#include <benchmark/benchmark.h>

#include "ops/grouped_linear.h"
#include "ops/linear_cross_entropy.h"
#include "ops/optimizer.h"
#include "ops/router.h"
#include "ops/rows.h"
#ifdef MARROW_CUDA
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#endif

namespace marrow {
namespace {

using at::Tensor;

struct Sizes {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  int64_t tokens = 2048, hidden = 256, experts = 16, top_k = 4, intermediate = 256;
  int64_t vocabulary = 512;
  int64_t rows() const { return tokens * top_k; }
  double element() const { return dtype == at::kFloat ? 4 : 2; }
};

bool have_gpu() {
#ifdef MARROW_CUDA
  return at::hasCUDA() && at::getNumGPUs() > 0;
#else
  return false;
#endif
}

Sizes sizes() {
  if (!have_gpu()) return {};
  return {at::Device(at::kCUDA, 0), at::kBFloat16, 32768, 2048, 128, 8, 768, 151936};
}

Tensor random(at::IntArrayRef shape, const Sizes& s, at::ScalarType dtype) {
  return at::randn(shape, at::device(s.device).dtype(dtype)).mul_(0.05);
}

Parameter parameter(at::IntArrayRef shape, const Sizes& s) {
  const Tensor value = random(shape, s, s.dtype);
  return {"weight", value, at::zeros(shape, value.options().dtype(at::kFloat))};
}

// Times `body`; `work` bytes or FLOPs are shown as `unit` per second. On the GPU between two events
// around kRepeats calls, so that launches overlap as they do in a run.
void measure(benchmark::State& state, double work, const char* unit, const std::function<void()>& body) {
  body();
  double seconds = 0, calls = 0;
  for (auto _ : state) {
    (void)_;
    double elapsed = 0;
#ifdef MARROW_CUDA
    if (have_gpu()) {
      constexpr int kRepeats = 10;
      const auto stream = c10::cuda::getCurrentCUDAStream().stream();
      cudaEvent_t begin = nullptr, end = nullptr;
      cudaEventCreate(&begin);
      cudaEventCreate(&end);
      cudaStreamSynchronize(stream);
      cudaEventRecord(begin, stream);
      for (int i = 0; i < kRepeats; ++i) body();
      cudaEventRecord(end, stream);
      cudaEventSynchronize(end);
      float milliseconds = 0;
      cudaEventElapsedTime(&milliseconds, begin, end);
      cudaEventDestroy(begin);
      cudaEventDestroy(end);
      elapsed = milliseconds * 1e-3 / kRepeats;
    }
#endif
    if (!have_gpu()) {
      const auto begin = std::chrono::steady_clock::now();
      body();
      elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    state.SetIterationTime(elapsed);
    seconds += elapsed;
    calls += 1;
  }
  state.counters[unit] = benchmark::Counter(work * calls / seconds);
}

// The backward alone, weight gradients included, of the graph behind `out`.
void measure_backward(benchmark::State& state, double work, const char* unit, const Tensor& out, Tensor leaf,
                      WeightGradQueue& queue) {
  const Tensor d_out = at::ones_like(out);
  measure(state, work, unit, [&] {
    leaf.mutable_grad() = Tensor();
    out.backward(d_out, true);
    queue.run_all();
  });
}

void router_forward(benchmark::State& state) {
  const Sizes s = sizes();
  const at::NoGradGuard no_grad;
  const Tensor x = random({s.tokens, s.hidden}, s, s.dtype);
  const Parameter w = parameter({s.experts, s.hidden}, s);
  WeightGradQueue queue;
  const double bytes = double(s.tokens) * (s.hidden * s.element() + s.experts * 12.0);
  measure(state, bytes, "B/s", [&] { router(x, w, {}, 1, {s.top_k, true, 1.0}, nullptr, queue); });
}

void router_backward(benchmark::State& state) {
  const Sizes s = sizes();
  const Tensor x = random({s.tokens, s.hidden}, s, s.dtype).set_requires_grad(true);
  const Parameter w = parameter({s.experts, s.hidden}, s);
  WeightGradQueue queue;
  const RouterOutput out = router(x, w, {}, 1, {s.top_k, true, 1.0}, nullptr, queue);
  const double bytes = double(s.tokens) * (3 * s.hidden * s.element() + s.experts * 16.0);
  measure_backward(state, bytes, "B/s", out.weights, x, queue);
}

Tensor random_experts(const Sizes& s) {
  const Tensor scores = at::rand({s.tokens, s.experts}, at::device(s.device));
  return std::get<1>(scores.topk(s.top_k)).to(at::kInt).contiguous();
}

void permutation(benchmark::State& state) {
  const Sizes s = sizes();
  const Tensor experts = random_experts(s);
  measure(state, double(s.rows()) * 20, "B/s", [&] { expert_permutation(experts, s.experts); });
}

void gather(benchmark::State& state) {
  const Sizes s = sizes();
  const at::NoGradGuard no_grad;
  const ExpertPermutation p = expert_permutation(random_experts(s), s.experts);
  const Tensor x = random({s.tokens, s.hidden}, s, s.dtype);
  const double bytes = double(s.rows() + s.tokens) * s.hidden * s.element();
  measure(state, bytes, "B/s", [&] { gather_rows(x, p.map, s.rows()); });
}

void sum(benchmark::State& state) {
  const Sizes s = sizes();
  const at::NoGradGuard no_grad;
  const ExpertPermutation p = expert_permutation(random_experts(s), s.experts);
  const Tensor rows = random({s.rows(), s.hidden}, s, s.dtype);
  const Tensor residual = random({s.tokens, s.hidden}, s, s.dtype);
  const double bytes = double(s.rows() + 2 * s.tokens) * s.hidden * s.element();
  measure(state, bytes, "B/s", [&] { sum_rows(rows, p.map, residual); });
}

// range(0): 0 = hidden to 2 · intermediate, 1 = intermediate to hidden. range(1): backward.
void grouped(benchmark::State& state) {
  const Sizes s = sizes();
  const bool down = state.range(0) == 1, backward = state.range(1) == 1;
  const int64_t n = down ? s.hidden : 2 * s.intermediate, k = down ? s.intermediate : s.hidden;
  const ExpertPermutation p = expert_permutation(random_experts(s), s.experts);
  const Tensor rows = random({s.rows(), k}, s, s.dtype).set_requires_grad(true);
  const Parameter w = parameter({s.experts, n, k}, s);
  WeightGradQueue queue;
  const double flops = 2.0 * s.rows() * n * k;
  if (backward) {
    const Tensor out = grouped_linear(rows, w, p.offsets, queue);
    measure_backward(state, 2 * flops, "FLOP/s", out, rows, queue);
  } else {
    const at::NoGradGuard no_grad;
    measure(state, flops, "FLOP/s", [&] { grouped_linear(rows, w, p.offsets, queue); });
  }
}

void head(benchmark::State& state) {
  const Sizes s = sizes();
  const bool with_gradient = state.range(0) == 1;
  const Tensor x = random({s.tokens, s.hidden}, s, s.dtype);
  const Parameter w = parameter({s.vocabulary, s.hidden}, s);
  const Tensor targets = at::randint(s.vocabulary, {s.tokens}, at::device(s.device).dtype(at::kInt));
  const double flops = (with_gradient ? 6.0 : 2.0) * s.tokens * s.hidden * s.vocabulary;
  measure(state, flops, "FLOP/s", [&] { linear_cross_entropy(x, w, targets, 1e-5, with_gradient); });
}

int64_t optimizer_elements() { return have_gpu() ? int64_t{1} << 28 : int64_t{1} << 22; }

// range(0): bf16 moments.
void adamw(benchmark::State& state) {
  const Sizes s = sizes();
  const bool bf16 = state.range(0) == 1, working_copy = s.dtype == at::kBFloat16;
  const int64_t n = optimizer_elements();
  const Tensor master = random({n}, s, at::kFloat), grad = random({n}, s, at::kFloat);
  const Tensor working = working_copy ? master.to(at::kBFloat16) : Tensor();
  const auto moments = bf16 ? at::kBFloat16 : at::kFloat;
  const Tensor m = at::zeros({n}, master.options().dtype(moments)), v = at::zeros_like(m);
  const Tensor scale = at::ones({1}, master.options());
  const AdamwStep step{1e-3, 0.9, 0.95, 1e-8, 0.1, 1, true};
  const double bytes = double(n) * (8 + 8 + (bf16 ? 8 : 16) + (working_copy ? 2 : 0));
  measure(state, bytes, "B/s", [&] { adamw_update(master, working, grad, m, v, scale, step); });
}

void muon(benchmark::State& state) {
  const Sizes s = sizes();
  const std::array<int64_t, 3> shape = {s.experts, s.intermediate, s.hidden};
  const Tensor master = random(shape, s, at::kFloat), grad = random(shape, s, at::kFloat);
  const Tensor momentum = at::zeros_like(master), scale = at::ones({1}, master.options());
  const double small = double(std::min(shape[1], shape[2])), large = std::max(shape[1], shape[2]);
  const double flops = 5.0 * shape[0] * 2 * (2 * small * small * large + small * small * small);
  measure(state, flops, "FLOP/s", [&] { muon_update(master, {}, grad, momentum, scale, {1e-2, 0.95, 0.1, false}); });
}

void squares(benchmark::State& state) {
  const Sizes s = sizes();
  const Tensor flat = random({optimizer_elements()}, s, at::kFloat);
  const Tensor total = at::zeros({1}, flat.options().dtype(at::kDouble));
  measure(state, 4.0 * flat.numel(), "B/s", [&] { add_sum_of_squares(flat, total); });
}

#define MARROW_BENCH(name) BENCHMARK(name)->UseManualTime()->Unit(benchmark::kMicrosecond)
MARROW_BENCH(router_forward);
MARROW_BENCH(router_backward);
MARROW_BENCH(permutation);
MARROW_BENCH(gather);
MARROW_BENCH(sum);
MARROW_BENCH(grouped)->ArgNames({"down", "backward"})->ArgsProduct({{0, 1}, {0, 1}});
MARROW_BENCH(head)->ArgName("gradient")->Arg(0)->Arg(1);
MARROW_BENCH(adamw)->ArgName("bf16")->Arg(0)->Arg(1);
MARROW_BENCH(muon);
MARROW_BENCH(squares);

}  // namespace
}  // namespace marrow

BENCHMARK_MAIN();
