#include <type_traits>

#include "ops/adamw_cuda.h"
#include "ops/cuda_check.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;

template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T values[kSize];
};

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void set(float* to, float x) { *to = x; }
__device__ void set(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

// kSize elements a thread, one access to each array.
template <typename Moment, int kSize>
__global__ void update(Pack<float, kSize>* master, Pack<__nv_bfloat16, kSize>* working,
                       Pack<float, kSize>* grad, Pack<Moment, kSize>* exp_avg,
                       Pack<Moment, kSize>* exp_avg_sq, const float* grad_scale, AdamwFactors f,
                       int64_t packs) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= packs) return;
  const float scale = *grad_scale;
  if (scale == 0.0f || !isfinite(scale)) {
    if (f.zero_grad) grad[i] = {};
    return;
  }
  auto w = master[i];
  const auto g = grad[i];
  auto m = exp_avg[i], v = exp_avg_sq[i];
  Pack<__nv_bfloat16, kSize> rounded;
#pragma unroll
  for (int u = 0; u < kSize; ++u) {
    const float d = scale * g.values[u];
    const float m0 = to_float(m.values[u]);
    const float m1 = m0 + f.one_minus_beta1 * (d - m0);
    const float v1 = f.beta2 * to_float(v.values[u]) + f.one_minus_beta2 * d * d;
    const float denominator = sqrtf(v1) * f.inverse_correction2 + f.eps;
    const float w1 = w.values[u] * f.decay - f.step_size * m1 / denominator;
    set(&m.values[u], m1);
    set(&v.values[u], v1);
    w.values[u] = w1;
    rounded.values[u] = __float2bfloat16_rn(w1);
  }
  master[i] = w;
  exp_avg[i] = m;
  exp_avg_sq[i] = v;
  if (working != nullptr) working[i] = rounded;
  if (f.zero_grad) grad[i] = {};
}

template <typename Moment, int kSize>
void launch(float* master, void* working, float* grad, void* exp_avg, void* exp_avg_sq,
            const float* grad_scale, const AdamwFactors& factors, int64_t n, cudaStream_t stream) {
  const int64_t packs = n / kSize;
  if (packs == 0) return;
  update<Moment, kSize>
      <<<static_cast<unsigned>((packs + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
          reinterpret_cast<Pack<float, kSize>*>(master),
          static_cast<Pack<__nv_bfloat16, kSize>*>(working),
          reinterpret_cast<Pack<float, kSize>*>(grad), static_cast<Pack<Moment, kSize>*>(exp_avg),
          static_cast<Pack<Moment, kSize>*>(exp_avg_sq), grad_scale, factors, packs);
}

template <typename Moment>
void update_all(float* master, void* working, float* grad, void* exp_avg, void* exp_avg_sq,
                const float* grad_scale, const AdamwFactors& factors, int64_t n,
                cudaStream_t stream) {
  auto* bf16 = static_cast<__nv_bfloat16*>(working);
  auto* m = static_cast<Moment*>(exp_avg);
  auto* v = static_cast<Moment*>(exp_avg_sq);
  const auto misaligned = [](const void* p, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes != 0;
  };
  const uintptr_t moment_bytes = 4 * sizeof(Moment);
  const bool vectors = !misaligned(master, 16) && !misaligned(grad, 16) && !misaligned(bf16, 8) &&
                       !misaligned(m, moment_bytes) && !misaligned(v, moment_bytes);
  const int64_t done = vectors ? n / 4 * 4 : 0;
  launch<Moment, 4>(master, bf16, grad, m, v, grad_scale, factors, done, stream);
  launch<Moment, 1>(master + done, bf16 == nullptr ? nullptr : bf16 + done, grad + done, m + done,
                    v + done, grad_scale, factors, n - done, stream);
}

}  // namespace

void adamw_update_cuda(float* master, void* working, float* grad, void* exp_avg, void* exp_avg_sq,
                       bool bf16_moments, const float* grad_scale, const AdamwFactors& factors,
                       int64_t n, void* stream) {
  (bf16_moments ? update_all<__nv_bfloat16> : update_all<float>)(master, working, grad, exp_avg,
                                                                 exp_avg_sq, grad_scale, factors, n,
                                                                 static_cast<cudaStream_t>(stream));
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
