// Speed of the dense operators: time, and GB/s of the bytes that must move or TFLOP/s. CPU sizes
// are those of a toy (8 × 256 tokens, hidden 256), GPU sizes those of Qwen3-30B-A3B (32,768
// tokens).
//   build/bench_ops_a --benchmark_filter=cpu      build-gpu/bench_ops_a --benchmark_filter=gpu
#include "ops/pch.h"
// After the precompiled header:
#include <ATen/detail/CUDAHooksInterface.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/autograd.h>

#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/philox_normal.h"
#include "ops/qk_norm_rope.h"
#include "ops/rms_norm.h"
#include "ops/swiglu.h"

namespace marrow {
namespace {

struct Sizes {
  at::Device device;
  at::ScalarType dtype;
  int64_t sequences, seq_len, hidden, q_heads, kv_heads, head_size, rows, width, vocabulary;

  int64_t tokens() const { return sequences * seq_len; }
  double bytes() const { return dtype == at::kFloat ? 4.0 : 2.0; }  // of an element
  at::Tensor random(at::IntArrayRef shape) const { return at::randn(shape, at::TensorOptions(device)).to(dtype); }
  Parameter parameter(at::IntArrayRef shape) const {
    return {"weight", random(shape), at::zeros(shape, at::TensorOptions(device))};
  }
};

void synchronize(at::Device device) {
  if (device.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(device.index());
}

// Times batches of calls between two synchronisations; `work` is bytes or flops of a call.
void measure(benchmark::State& state, const Sizes& sizes, const std::string& unit, double work,
             const std::function<void()>& call) {
  for (int warm_up = 0; warm_up < 3; ++warm_up) call();
  synchronize(sizes.device);
  const int64_t batch = sizes.device.is_cuda() ? 20 : 1;
  int64_t calls = 0;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < batch; ++i) call();
    synchronize(sizes.device);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    state.SetIterationTime(elapsed.count() / static_cast<double>(batch));
    ++calls;
  }
  const double scale = unit == "GB/s" ? 1e-9 : 1e-12;
  state.counters[unit] = benchmark::Counter(work * scale * static_cast<double>(calls), benchmark::Counter::kIsRate);
}

// A forward without history, then the backward alone on a kept graph.
struct Graph {
  std::vector<at::Tensor> outputs, gradients;
  void backward(const std::vector<at::Tensor>& leaves) const {
    for (const at::Tensor& leaf : leaves) leaf.mutable_grad() = at::Tensor();
    torch::autograd::backward(outputs, gradients, /*retain_graph=*/true);
  }
};

Graph graph_of(const std::vector<at::Tensor>& outputs) {
  Graph graph{outputs, {}};
  for (const at::Tensor& output : outputs) graph.gradients.push_back(at::randn_like(output));
  return graph;
}

using Body = std::function<void(benchmark::State&, const Sizes&)>;

void philox(benchmark::State& state, const Sizes& s) {
  at::Tensor out = s.random({s.vocabulary, s.hidden});
  measure(state, s, "GB/s", out.numel() * s.bytes(), [&] { philox_normal(out, 1, "embedding", 0, 0.02); });
}

void norm_forward(benchmark::State& state, const Sizes& s) {
  const at::Tensor x = s.random({s.tokens(), s.hidden});
  const Parameter weight = s.parameter({s.hidden});
  measure(state, s, "GB/s", 2.0 * x.numel() * s.bytes(), [&] { rms_norm(x, weight, 1e-6); });
}

void add_norm_forward(benchmark::State& state, const Sizes& s) {
  const at::Tensor x = s.random({s.tokens(), s.hidden}), r = s.random({s.tokens(), s.hidden});
  const Parameter weight = s.parameter({s.hidden});
  measure(state, s, "GB/s", 4.0 * x.numel() * s.bytes(), [&] { add_rms_norm(x, r, weight, 1e-6); });
}

void add_norm_backward(benchmark::State& state, const Sizes& s) {
  const at::Tensor x = s.random({s.tokens(), s.hidden}).set_requires_grad(true);
  const Parameter weight = s.parameter({s.hidden});
  const auto [sum, normed] = add_rms_norm(x, s.random({s.tokens(), s.hidden}), weight, 1e-6);
  const Graph graph = graph_of({sum, normed});
  measure(state, s, "GB/s", 4.0 * x.numel() * s.bytes(), [&] { graph.backward({x}); });
}

struct Rope {
  Parameter q_norm, k_norm;
  RopeTable table;
  at::Tensor positions;
  explicit Rope(const Sizes& s)
      : q_norm(s.parameter({s.head_size})),
        k_norm(s.parameter({s.head_size})),
        table(make_rope_table(rope_inverse_frequencies(1e6, s.head_size), s.seq_len, 1.0, s.device)),
        positions(
            at::arange(s.tokens(), at::TensorOptions(s.device).dtype(at::kInt)).remainder(s.seq_len).to(at::kInt)) {}
};

void rope_forward(benchmark::State& state, const Sizes& s) {
  const Rope rope(s);
  const at::Tensor qkv = s.random({s.tokens(), (s.q_heads + 2 * s.kv_heads) * s.head_size});
  const double elements = static_cast<double>(s.tokens() * (s.q_heads + s.kv_heads) * s.head_size);
  measure(state, s, "GB/s", 2 * elements * s.bytes(), [&] {
    qk_norm_rope(qkv, rope.q_norm, rope.k_norm, rope.table, rope.positions, s.q_heads, s.kv_heads, 1e-6);
  });
}

void rope_backward(benchmark::State& state, const Sizes& s) {
  const Rope rope(s);
  const at::Tensor qkv = s.random({s.tokens(), (s.q_heads + 2 * s.kv_heads) * s.head_size}).set_requires_grad(true);
  const auto [q, k, v] =
      qk_norm_rope(qkv, rope.q_norm, rope.k_norm, rope.table, rope.positions, s.q_heads, s.kv_heads, 1e-6);
  Graph graph{{q, k, v}, {at::randn_like(q), at::randn_like(k), at::randn(v.sizes(), v.options())}};
  const double elements = static_cast<double>(s.tokens() * s.head_size) *
                          static_cast<double>(3 * (s.q_heads + s.kv_heads) + 2 * s.kv_heads);
  measure(state, s, "GB/s", elements * s.bytes(), [&] { graph.backward({qkv}); });
}

struct Heads {
  at::Tensor q, k, v;
  AttentionLayout layout;
  double scale, flops;  // flops of the causal forward
  Heads(const Sizes& s, bool documents)
      : q(s.random({s.tokens(), s.q_heads, s.head_size}).set_requires_grad(true)),
        k(s.random({s.tokens(), s.kv_heads, s.head_size}).set_requires_grad(true)),
        v(s.random({s.tokens(), s.kv_heads, s.head_size}).set_requires_grad(true)),
        layout{s.sequences, s.seq_len, {}, 0},
        scale(1.0 / std::sqrt(static_cast<double>(s.head_size))),
        flops(2.0 * static_cast<double>(s.tokens() * s.seq_len * s.q_heads * s.head_size)) {
    const int64_t length = s.seq_len / 4;
    for (int64_t t = 0; documents && t <= s.tokens(); t += length) {
      layout.document_offsets.push_back(static_cast<int32_t>(t));
    }
    if (documents) flops /= 4;
  }
};

Body attention_forward(bool documents, bool deterministic) {
  return [=](benchmark::State& state, const Sizes& s) {
    const Heads h(s, documents);
    const at::NoGradGuard guard;
    measure(state, s, "TFLOP/s", h.flops, [&] { attention(h.q, h.k, h.v, h.layout, h.scale, deterministic); });
  };
}

Body attention_backward(bool documents, bool deterministic) {
  return [=](benchmark::State& state, const Sizes& s) {
    const Heads h(s, documents);
    const Graph graph = graph_of({attention(h.q, h.k, h.v, h.layout, h.scale, deterministic)});
    measure(state, s, "TFLOP/s", 2.5 * h.flops, [&] { graph.backward({h.q, h.k, h.v}); });
  };
}

void swiglu_forward(benchmark::State& state, const Sizes& s) {
  const at::Tensor x = s.random({s.rows, 2 * s.width});
  const at::Tensor weight = at::rand({s.rows}, at::TensorOptions(s.device));
  measure(state, s, "GB/s", 1.5 * x.numel() * s.bytes(), [&] { swiglu(x, weight); });
}

void swiglu_backward(benchmark::State& state, const Sizes& s) {
  const at::Tensor x = s.random({s.rows, 2 * s.width}).set_requires_grad(true);
  const at::Tensor weight = at::rand({s.rows}, at::TensorOptions(s.device)).set_requires_grad(true);
  const Graph graph = graph_of({swiglu(x, weight)});
  measure(state, s, "GB/s", 2.5 * x.numel() * s.bytes(), [&] { graph.backward({x, weight}); });
}

at::Tensor zipf_ids(const Sizes& s) {  // token frequencies as in text
  const at::Tensor rank = at::rand({s.tokens()}, at::TensorOptions(s.device)).mul(-1).exp2();
  return rank.pow(std::log2(static_cast<double>(s.vocabulary))).mul(s.vocabulary - 1).to(at::kInt);
}

void embed_forward(benchmark::State& state, const Sizes& s) {
  const Parameter weight = s.parameter({s.vocabulary, s.hidden});
  const at::Tensor ids = zipf_ids(s);
  measure(state, s, "GB/s", 2.0 * static_cast<double>(s.tokens() * s.hidden) * s.bytes(),
          [&] { embedding_forward(ids, weight); });
}

Body embed_backward(bool deterministic) {
  return [=](benchmark::State& state, const Sizes& s) {
    const Parameter weight = s.parameter({s.vocabulary, s.hidden});
    const at::Tensor ids = zipf_ids(s), d = s.random({s.tokens(), s.hidden});
    measure(state, s, "GB/s", static_cast<double>(s.tokens() * s.hidden) * (s.bytes() + 8),
            [&] { embedding_backward(ids, d, weight, deterministic); });
  };
}

void linear_forward(benchmark::State& state, const Sizes& s) {
  const int64_t out = (s.q_heads + 2 * s.kv_heads) * s.head_size;
  const at::Tensor x = s.random({s.tokens(), s.hidden});
  const Parameter weight = s.parameter({out, s.hidden});
  WeightGradQueue queue;
  measure(state, s, "TFLOP/s", 2.0 * static_cast<double>(s.tokens() * s.hidden * out),
          [&] { linear(x, weight, queue); });
}

void linear_backward(benchmark::State& state, const Sizes& s) {
  const int64_t out = (s.q_heads + 2 * s.kv_heads) * s.head_size;
  const at::Tensor x = s.random({s.tokens(), s.hidden}).set_requires_grad(true);
  const Parameter weight = s.parameter({out, s.hidden});
  WeightGradQueue queue;
  const Graph graph = graph_of({linear(x, weight, queue)});
  measure(state, s, "TFLOP/s", 4.0 * static_cast<double>(s.tokens() * s.hidden * out), [&] {
    graph.backward({x});
    queue.run_all();
  });
}

void add(const std::string& name, const Body& body) {
  const Sizes cpu{at::kCPU, at::kFloat, 8, 256, 256, 4, 2, 64, 8192, 256, 512};
  const Sizes gpu{at::Device(at::kCUDA, 0), at::kBFloat16, 8, 4096, 2048, 32, 4, 128, 262144, 768, 151936};
  const auto add_for = [&](const char* where, const Sizes& sizes) {
    benchmark::RegisterBenchmark((std::string(where) + "/" + name).c_str(),
                                 [=](benchmark::State& state) { body(state, sizes); })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  };
  add_for("cpu", cpu);
#ifdef MARROW_CUDA
  if (at::getNumGPUs() > 0) add_for("gpu", gpu);
#endif
  (void)gpu;
}

}  // namespace
}  // namespace marrow

int main(int argc, char** argv) {
  using namespace marrow;
  at::set_num_threads(1);
  add("philox_normal", philox);
  add("rms_norm forward", norm_forward);
  add("add_rms_norm forward", add_norm_forward);
  add("add_rms_norm backward", add_norm_backward);
  add("qk_norm_rope forward", rope_forward);
  add("qk_norm_rope backward", rope_backward);
  add("attention forward", attention_forward(false, false));
  add("attention backward", attention_backward(false, false));
  add("attention forward deterministic", attention_forward(false, true));
  add("attention backward deterministic", attention_backward(false, true));
  add("attention forward documents", attention_forward(true, false));
  add("attention backward documents", attention_backward(true, false));
  add("swiglu forward", swiglu_forward);
  add("swiglu backward", swiglu_backward);
  add("embedding forward", embed_forward);
  add("embedding backward", embed_backward(false));
  add("embedding backward deterministic", embed_backward(true));
  add("linear forward", linear_forward);
  add("linear backward", linear_backward);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
