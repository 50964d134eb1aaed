#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;

__device__ bool gated(float scale) { return scale == 0.0f || !isfinite(scale); }
__device__ float lerp1(float a, float b, float t) { return a + t * (b - a); }

// Matrices have any size and may start anywhere: pack i holds elements 4i … 4i + 3, one by one
// where `vectors` is false or the end is near.
template <typename T>
__device__ void load4(const T* from, int64_t i, int64_t n, bool vectors, float (&to)[4]) {
  if (vectors && 4 * i + 4 <= n) return load_pack<4>(from + 4 * i, to);
#pragma unroll
  for (int u = 0; u < 4; ++u) to[u] = 4 * i + u < n ? static_cast<float>(from[4 * i + u]) : 0.0f;
}

template <typename T>
__device__ void store4(T* to, const float (&from)[4], int64_t i, int64_t n, bool vectors) {
  if (vectors && 4 * i + 4 <= n) return store_pack<4>(to + 4 * i, from);
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    if (4 * i + u < n) to[4 * i + u] = static_cast<T>(from[u]);
  }
}

__global__ void momentum_step(float* grad, float* buffer, bf16* direction, const float* grad_scale,
                              float momentum, bool zero_grad, int64_t n, bool vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (4 * i >= n) return;
  const float scale = *grad_scale;
  float d[4] = {};
  if (!gated(scale)) {
    float g[4], b[4];
    load4(grad, i, n, vectors, g);
    load4(buffer, i, n, vectors, b);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      g[u] *= scale;
      b[u] = lerp1(b[u], g[u], 1.0f - momentum);
      d[u] = lerp1(g[u], b[u], momentum);
    }
    store4(buffer, b, i, n, vectors);
  }
  store4(direction, d, i, n, vectors);
  const float zeros[4] = {};
  if (zero_grad) store4(grad, zeros, i, n, vectors);
}

__global__ void apply(float* master, bf16* working, const bf16* orthogonal, const float* grad_scale,
                      float decay, float step_size, int64_t n, bool vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (4 * i >= n || gated(*grad_scale)) return;
  float o[4], w[4];
  load4(orthogonal, i, n, vectors, o);
  load4(master, i, n, vectors, w);
#pragma unroll
  for (int u = 0; u < 4; ++u) w[u] = decay * w[u] - step_size * o[u];
  store4(master, w, i, n, vectors);
  if (working != nullptr) store4(working, w, i, n, vectors);
}

unsigned blocks_of(int64_t n) { return static_cast<unsigned>((n / 4 + kThreads) / kThreads); }

}  // namespace

void muon_momentum_cuda(View grad, View momentum_buffer, View direction, View grad_scale,
                        float momentum, bool zero_grad) {
  const bool vectors = aligned_to(grad.data, 16) && aligned_to(momentum_buffer.data, 16) &&
                       aligned_to(direction.data, 8);
  momentum_step<<<blocks_of(grad.elements), kThreads, 0, current_stream()>>>(
      grad, momentum_buffer, direction, grad_scale, momentum, zero_grad, grad.elements, vectors);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void muon_apply_cuda(View master, View working, View orthogonal, View grad_scale, float decay,
                     float step_size) {
  const bool vectors =
      aligned_to(master.data, 16) && aligned_to(working.data, 8) && aligned_to(orthogonal.data, 8);
  apply<<<blocks_of(master.elements), kThreads, 0, current_stream()>>>(
      master, working, orthogonal, grad_scale, decay, step_size, master.elements, vectors);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
