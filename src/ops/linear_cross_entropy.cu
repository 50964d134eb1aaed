#include <algorithm>

#include "ops/cuda_check.cuh"
#include "ops/linear_cross_entropy_cuda.h"

namespace marrow {
namespace {

constexpr int kThreads = 1024;
constexpr int kCacheBytes = 200 * 1024;  // of a row, kept in shared memory between the two passes
constexpr float kLog2E = 1.4426950408889634f;

template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T values[kSize];
};

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void set(float* to, float x) { *to = x; }
__device__ void set(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

// Σ e^(logit - top), with the largest logit so far. The difference is taken before the scaling to
// base 2: large logits would lose digits the other way round.
struct Softmax {
  float top = -INFINITY, sum = 0.0f;
};

__device__ Softmax merge(Softmax a, Softmax b) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {top, a.sum + b.sum};
  return {top, a.sum * exp2f((a.top - top) * kLog2E) + b.sum * exp2f((b.top - top) * kLog2E)};
}

__device__ Softmax block_merge(Softmax x) {
  __shared__ Softmax warps[kThreads / 32];
  const auto warp_merge = [](Softmax y) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      y = merge(y, {__shfl_xor_sync(~0u, y.top, step), __shfl_xor_sync(~0u, y.sum, step)});
    }
    return y;
  };
  x = warp_merge(x);
  __syncthreads();  // the previous row's readers are done
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_merge(warps[threadIdx.x % 32]);
}

template <typename T, int kSize>
__device__ void add_pack(Softmax& running, const Pack<T, kSize>& pack) {
  float x[kSize], top = running.top;
#pragma unroll
  for (int u = 0; u < kSize; ++u) {
    x[u] = to_float(pack.values[u]);
    top = fmaxf(top, x[u]);
  }
  float sum = top == running.top ? running.sum : running.sum * exp2f((running.top - top) * kLog2E);
#pragma unroll
  for (int u = 0; u < kSize; ++u) sum += exp2f((x[u] - top) * kLog2E);
  running = {top, sum};
}

// A block takes one row after the other: once over it for the sum of exponentials, once for the
// gradient. Most of the row waits in shared memory, the rest in L2.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads, 1)
    cross_entropy(T* logits, const int32_t* targets, float* losses, int64_t rows,
                  int64_t vocabulary, int64_t cached, float gradient_scale, bool with_gradient) {
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
    const float target_logit = valid ? to_float(logits[r * vocabulary + target]) : NAN;
    Softmax running;
    constexpr int kUnroll = 4;
    for (int64_t first = threadIdx.x; first < packs; first += kThreads * kUnroll) {
      Packed loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = first + u * kThreads;
        if (i < packs) loaded[u] = row[i];
      }
#pragma unroll
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
#pragma unroll
      for (int u = 0; u < kSize; ++u) {
        const float p = exp2f((to_float(in.values[u]) - total.top) * kLog2E - log2_sum);
        const float d = i * kSize + u == target ? p - 1.0f : p;
        set(&out.values[u], d * gradient_scale);
      }
      row[i] = out;
    }
  }
}

template <typename T, int kSize>
void launch(void* logits, const int32_t* targets, float* losses, int64_t rows, int64_t vocabulary,
            float gradient_scale, bool with_gradient, cudaStream_t stream) {
  const int64_t packs = vocabulary / kSize, bytes = sizeof(T) * kSize;
  const int64_t cached = with_gradient ? std::min<int64_t>(packs, kCacheBytes / bytes) : 0;
  const auto kernel = cross_entropy<T, kSize>;
  MARROW_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCacheBytes));
  int device = 0, processors = 0;
  MARROW_CUDA_CHECK(cudaGetDevice(&device));
  MARROW_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(rows, processors));
  kernel<<<blocks, kThreads, cached * bytes, stream>>>(static_cast<T*>(logits), targets, losses,
                                                       rows, vocabulary, cached, gradient_scale,
                                                       with_gradient);
}

__global__ void sum_all(const float* losses, int64_t count, float* loss_sum) {
  __shared__ double sums[kThreads];
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += losses[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *loss_sum = static_cast<float>(sums[0]);
}

}  // namespace

void cross_entropy_cuda(void* logits, const int32_t* targets, float* losses, int64_t rows,
                        int64_t vocabulary, bool bf16, float gradient_scale, bool with_gradient,
                        void* stream) {
  if (rows == 0) return;
  const bool vectors =
      vocabulary % (bf16 ? 8 : 4) == 0 && reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  const auto run = bf16 ? (vectors ? launch<__nv_bfloat16, 8> : launch<__nv_bfloat16, 1>)
                        : (vectors ? launch<float, 4> : launch<float, 1>);
  run(logits, targets, losses, rows, vocabulary, gradient_scale, with_gradient,
      static_cast<cudaStream_t>(stream));
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void sum_losses_cuda(const float* losses, int64_t count, float* loss_sum, void* stream) {
  sum_all<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(losses, count, loss_sum);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
