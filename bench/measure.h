// Sizes and timing of the benchmarks of operators.
#pragma once
#include "ops/pch.h"
// After the precompiled header:
#include "ops/parameter.h"
#ifdef MARROW_CUDA
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#endif

namespace marrow {

using Body = std::function<void()>;

constexpr int kRepeats = 10;

struct Sizes {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  int64_t sequences = 8, seq_len = 256, hidden = 256, q_heads = 4, kv_heads = 2, head_size = 64;
  int64_t experts = 16, top_k = 4, intermediate = 256, vocabulary = 512, optimizer_elements = int64_t{1} << 22;

  int64_t tokens() const { return sequences * seq_len; }
  int64_t rows() const { return tokens() * top_k; }
  int64_t qkv() const { return (q_heads + 2 * kv_heads) * head_size; }
  double element() const { return dtype == at::kFloat ? 4 : 2; }
  double token_bytes() const { return static_cast<double>(tokens() * hidden) * element(); }
  double row_bytes() const { return static_cast<double>(rows() * hidden) * element(); }
  at::Tensor random(at::IntArrayRef shape) const { return at::randn(shape, at::device(device)).mul_(0.05).to(dtype); }
  at::Tensor leaf(at::IntArrayRef shape) const { return random(shape).set_requires_grad(true); }
  Parameter parameter(at::IntArrayRef shape, bool with_grad = true) const {
    return {"weight", random(shape), with_grad ? at::zeros(shape, at::device(device)) : at::Tensor()};
  }
};

inline Sizes sizes() {
#ifdef MARROW_CUDA
  if (at::hasCUDA() && at::getNumGPUs() > 0) {
    return {at::Device(at::kCUDA, 0), at::kBFloat16, 4, 4096, 2048, 32, 4, 128, 128, 8, 768, 151936, int64_t{1} << 28};
  }
#endif
  return {};
}

// Seconds of kRepeats calls of `body`. On the GPU all of them are queued behind work of some milliseconds, so that the
// host's time is not in it.
inline double seconds_of(const Body& body) {
#ifdef MARROW_CUDA
  if (sizes().device.is_cuda()) {
    static const at::Tensor square = at::randn({8192, 8192}, at::device(at::kCUDA).dtype(at::kBFloat16));
    const auto stream = c10::cuda::getCurrentCUDAStream().stream();
    cudaEvent_t begin = nullptr, end = nullptr;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int i = 0; i < 4; ++i) at::mm(square, square);
    cudaEventRecord(begin, stream);
    for (int i = 0; i < kRepeats; ++i) body();
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin, end);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return milliseconds * 1e-3;
  }
#endif
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRepeats; ++i) body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Experts [T, k] as a router from random weights chooses them on natural tokens: the busiest is chosen by nearly every
// token. `even`: all equally often.
inline at::Tensor choose_experts(const Sizes& s, bool even) {
  const at::Tensor noise = at::rand({s.tokens(), s.experts}, at::device(s.device)).log().neg().log().neg();
  const at::Tensor rank = at::randperm(s.experts, at::device(s.device)).add(1).to(at::kFloat);
  return std::get<1>((even ? noise : noise - rank.log()).topk(s.top_k)).to(at::kInt).contiguous();
}

}  // namespace marrow
