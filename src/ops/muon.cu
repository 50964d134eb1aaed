#include "ops/cuda_check.cuh"
#include "ops/muon_cuda.h"

namespace marrow {
namespace {

constexpr int kThreads = 256;

struct alignas(8) Bf16x4 {
  __nv_bfloat162 low, high;
};

__device__ float4 to_float4(Bf16x4 x) {
  const float2 low = __bfloat1622float2(x.low), high = __bfloat1622float2(x.high);
  return {low.x, low.y, high.x, high.y};
}

__device__ Bf16x4 to_bf16(float4 x) {
  return {__floats2bfloat162_rn(x.x, x.y), __floats2bfloat162_rn(x.z, x.w)};
}

__device__ bool gated(float scale) { return scale == 0.0f || !isfinite(scale); }
__device__ float lerp1(float a, float b, float t) { return a + t * (b - a); }

// Matrices have any size and may start anywhere: pack i holds elements 4i … 4i + 3, one by one
// where `vectors` is false or the end is near.
__device__ float4 load4(const float* from, int64_t i, int64_t n, bool vectors) {
  if (vectors && 4 * i + 4 <= n) return reinterpret_cast<const float4*>(from)[i];
  float4 x{};
  float* to[] = {&x.x, &x.y, &x.z, &x.w};
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    if (4 * i + u < n) *to[u] = from[4 * i + u];
  }
  return x;
}

__device__ void store4(float* to, float4 x, int64_t i, int64_t n, bool vectors) {
  if (vectors && 4 * i + 4 <= n) {
    reinterpret_cast<float4*>(to)[i] = x;
    return;
  }
  const float values[] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    if (4 * i + u < n) to[4 * i + u] = values[u];
  }
}

__device__ float4 load4(const __nv_bfloat16* from, int64_t i, int64_t n, bool vectors) {
  if (vectors && 4 * i + 4 <= n) return to_float4(reinterpret_cast<const Bf16x4*>(from)[i]);
  float4 x{};
  float* to[] = {&x.x, &x.y, &x.z, &x.w};
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    if (4 * i + u < n) *to[u] = __bfloat162float(from[4 * i + u]);
  }
  return x;
}

__device__ void store4(__nv_bfloat16* to, float4 x, int64_t i, int64_t n, bool vectors) {
  if (vectors && 4 * i + 4 <= n) {
    reinterpret_cast<Bf16x4*>(to)[i] = to_bf16(x);
    return;
  }
  const float values[] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    if (4 * i + u < n) to[4 * i + u] = __float2bfloat16_rn(values[u]);
  }
}

__global__ void momentum_step(float* grad, float* buffer, __nv_bfloat16* direction,
                              const float* grad_scale, float momentum, bool zero_grad, int64_t n,
                              bool vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (4 * i >= n) return;
  const float scale = *grad_scale;
  float4 d{};
  if (!gated(scale)) {
    const float4 raw = load4(grad, i, n, vectors);
    const float4 g{scale * raw.x, scale * raw.y, scale * raw.z, scale * raw.w};
    float4 b = load4(buffer, i, n, vectors);
    const float t = 1.0f - momentum;
    b = {lerp1(b.x, g.x, t), lerp1(b.y, g.y, t), lerp1(b.z, g.z, t), lerp1(b.w, g.w, t)};
    store4(buffer, b, i, n, vectors);
    d = {lerp1(g.x, b.x, momentum), lerp1(g.y, b.y, momentum), lerp1(g.z, b.z, momentum),
         lerp1(g.w, b.w, momentum)};
  }
  store4(direction, d, i, n, vectors);
  if (zero_grad) store4(grad, float4{}, i, n, vectors);
}

__global__ void apply(float* master, __nv_bfloat16* working, const __nv_bfloat16* orthogonal,
                      const float* grad_scale, float decay, float step_size, int64_t n,
                      bool vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (4 * i >= n || gated(*grad_scale)) return;
  const float4 o = load4(orthogonal, i, n, vectors);
  float4 w = load4(master, i, n, vectors);
  w = {decay * w.x - step_size * o.x, decay * w.y - step_size * o.y, decay * w.z - step_size * o.z,
       decay * w.w - step_size * o.w};
  store4(master, w, i, n, vectors);
  if (working != nullptr) store4(working, w, i, n, vectors);
}

bool aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

unsigned blocks_for(int64_t n) { return static_cast<unsigned>((n / 4 + kThreads) / kThreads); }

}  // namespace

void muon_momentum_cuda(float* grad, float* momentum_buffer, void* direction,
                        const float* grad_scale, float momentum, bool zero_grad, int64_t n,
                        void* stream) {
  const bool vectors = aligned(grad, 16) && aligned(momentum_buffer, 16) && aligned(direction, 8);
  momentum_step<<<blocks_for(n), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      grad, momentum_buffer, static_cast<__nv_bfloat16*>(direction), grad_scale, momentum,
      zero_grad, n, vectors);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void muon_apply_cuda(float* master, void* working, const void* orthogonal, const float* grad_scale,
                     float decay, float step_size, int64_t n, void* stream) {
  const bool vectors = aligned(master, 16) && aligned(working, 8) && aligned(orthogonal, 8);
  apply<<<blocks_for(n), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      master, static_cast<__nv_bfloat16*>(working), static_cast<const __nv_bfloat16*>(orthogonal),
      grad_scale, decay, step_size, n, vectors);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
