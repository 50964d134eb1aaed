#include <algorithm>

#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 2;               // of a multiprocessor: one reads while the other writes
constexpr int kCacheBytes = 112 * 1024;  // of a row, kept in shared memory between the two passes
constexpr float kLog2E = 1.4426950408889634f;

// Σ e^(logit - top), with the largest logit so far. The difference is taken before the scaling to
// base 2: large logits would lose digits the other way round.
struct Softmax {
  float top = -INFINITY, sum = 0.0f;
};

// exp2f without its detour for results below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ Softmax merge(Softmax a, Softmax b) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {top, a.sum + b.sum};
  return {top, a.sum * exp2f((a.top - top) * kLog2E) + b.sum * exp2f((b.top - top) * kLog2E)};
}

__device__ Softmax block_merge(Softmax x) {
  __shared__ Softmax warps[kThreads / 32];
  const auto warp_merge = [](Softmax y) {
    for (int step = 16; step > 0; step /= 2) {
      y = merge(y, {__shfl_xor_sync(~0u, y.top, step), __shfl_xor_sync(~0u, y.sum, step)});
    }
    return y;
  };
  x = warp_merge(x);
  __syncthreads();  // the previous row's readers are done
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return warp_merge(lane < kThreads / 32 ? warps[lane] : Softmax{});
}

template <typename T, int kSize>
__device__ void add_pack(Softmax& running, const Pack<T, kSize>& pack) {
  float x[kSize], top = running.top;
  for (int u = 0; u < kSize; ++u) {
    x[u] = static_cast<float>(pack.items[u]);
    top = fmaxf(top, x[u]);
  }
  float sum = top == running.top ? running.sum : running.sum * exp2_fast((running.top - top) * kLog2E);
  for (int u = 0; u < kSize; ++u) sum += exp2_fast((x[u] - top) * kLog2E);
  running = {top, sum};
}

// A block takes one row after the other: once over it for the sum of exponentials, once for the
// gradient. What fits of the row waits in shared memory, the rest in L2.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads, kBlocks)
    cross_entropy(T* logits, const int32_t* targets, float* losses, int64_t rows, int64_t vocabulary, int64_t cached,
                  float gradient_scale, bool with_gradient) {
  using Packed = Pack<T, kSize>;
  extern __shared__ __align__(16) unsigned char bytes[];
  auto* cache = reinterpret_cast<Packed*>(bytes);
  const int64_t packs = vocabulary / kSize;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    auto* row = reinterpret_cast<Packed*>(logits + r * vocabulary);
    const int64_t target = targets[r];
    if (target == -1) {
      if (threadIdx.x == 0) losses[r] = 0.0f;
      for (int64_t i = threadIdx.x; with_gradient && i < packs; i += kThreads) row[i] = Packed{};
      continue;
    }
    const bool valid = target >= 0 && target < vocabulary;
    const float target_logit = valid ? static_cast<float>(logits[r * vocabulary + target]) : NAN;
    Softmax running;
    constexpr int kUnroll = 4;
    for (int64_t first = threadIdx.x; first < packs; first += kThreads * kUnroll) {
      Packed loaded[kUnroll];
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = first + u * kThreads;
        if (i < packs) loaded[u] = row[i];
      }
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = first + u * kThreads;
        if (i >= packs) continue;
        if (with_gradient && i < cached) cache[i] = loaded[u];
        add_pack(running, loaded[u]);
      }
    }
    const Softmax total = block_merge(running);
    const float log2_sum = log2f(total.sum);
    if (threadIdx.x == 0) losses[r] = (total.top - target_logit) + log2_sum / kLog2E;
    if (!with_gradient) continue;
    for (int64_t i = threadIdx.x; i < packs; i += kThreads) {
      const Packed in = i < cached ? cache[i] : row[i];
      Packed out;
      for (int u = 0; u < kSize; ++u) {
        const float p = exp2_fast((static_cast<float>(in.items[u]) - total.top) * kLog2E - log2_sum);
        const float d = i * kSize + u == target ? p - 1.0f : p;
        out.items[u] = static_cast<T>(d * gradient_scale);
      }
      row[i] = out;
    }
  }
}

}  // namespace

void cross_entropy_cuda(View logits, View targets, View losses, float gradient_scale, bool with_gradient) {
  if (logits.rows == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(logits.rows, kBlocks * multiprocessors()));
  launch_packs(logits.bf16, in_packs(logits.width, logits), [&]<typename T, int kSize>() {
    const int64_t packs = logits.width / kSize, bytes = sizeof(T) * kSize;
    const int64_t cached = with_gradient ? std::min<int64_t>(packs, kCacheBytes / bytes) : 0;
    const auto kernel = cross_entropy<T, kSize>;
    MARROW_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCacheBytes));
    kernel<<<blocks, kThreads, cached * bytes, current_stream()>>>(logits, targets, losses, logits.rows, logits.width,
                                                                   cached, gradient_scale, with_gradient);
  });
}

}  // namespace marrow
