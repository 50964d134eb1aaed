#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;

// A step whose gradient scale is 0 or not finite is skipped.
__device__ bool gated(float scale) { return scale == 0.0f || !isfinite(scale); }

// kSize elements a thread, one access to each array.
template <typename Moment, int kSize>
__global__ void adamw_step(Pack<float, kSize>* master, Pack<bf16, kSize>* working, Pack<float, kSize>* grad,
                           Pack<Moment, kSize>* exp_avg, Pack<Moment, kSize>* exp_avg_sq, const float* grad_scale,
                           AdamwFactors f, int64_t packs) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= packs) return;
  const float scale = *grad_scale;
  if (gated(scale)) {
    if (f.zero_grad) grad[i] = {};
    return;
  }
  auto w = master[i];
  const auto g = grad[i];
  auto m = exp_avg[i], v = exp_avg_sq[i];
  Pack<bf16, kSize> rounded;
  for (int u = 0; u < kSize; ++u) {
    const float d = scale * g.items[u];
    const float m0 = static_cast<float>(m.items[u]);
    const float m1 = m0 + f.one_minus_beta1 * (d - m0);
    const float v1 = f.beta2 * static_cast<float>(v.items[u]) + f.one_minus_beta2 * d * d;
    const float denominator = sqrtf(v1) * f.inverse_correction2 + f.eps;
    const float w1 = w.items[u] * f.decay - f.step_size * m1 / denominator;
    m.items[u] = static_cast<Moment>(m1);
    v.items[u] = static_cast<Moment>(v1);
    w.items[u] = w1;
    rounded.items[u] = __float2bfloat16_rn(w1);
  }
  master[i] = w;
  exp_avg[i] = m;
  exp_avg_sq[i] = v;
  if (working != nullptr) working[i] = rounded;
  if (f.zero_grad) grad[i] = {};
}

// Updates the elements from `first` on, in packs of kSize; the rest of them is left.
template <typename Moment, int kSize>
void launch(const View& master, const View& working, const View& grad, const View& exp_avg, const View& exp_avg_sq,
            const View& grad_scale, const AdamwFactors& factors, int64_t first) {
  const int64_t packs = (master.elements - first) / kSize;
  if (packs == 0) return;
  const auto from = [&]<typename T>(T* data) {
    return data == nullptr ? nullptr : reinterpret_cast<Pack<T, kSize>*>(data + first);
  };
  adamw_step<Moment, kSize><<<blocks_for(packs, kThreads), kThreads, 0, current_stream()>>>(
      from(static_cast<float*>(master)), from(static_cast<bf16*>(working)), from(static_cast<float*>(grad)),
      from(static_cast<Moment*>(exp_avg)), from(static_cast<Moment*>(exp_avg_sq)), grad_scale, factors, packs);
}

__device__ float lerp1(float a, float b, float t) { return a + t * (b - a); }

// Matrices have any size and may start anywhere: pack i holds elements 4i … 4i + 3, one by one
// where `vectors` is false or the end is near.
template <typename T>
__device__ void load4(const T* from, int64_t i, int64_t n, bool vectors, float (&to)[4]) {
  if (vectors && 4 * i + 4 <= n) return load_pack<4>(from + 4 * i, to);
  for (int u = 0; u < 4; ++u) to[u] = 4 * i + u < n ? static_cast<float>(from[4 * i + u]) : 0.0f;
}

template <typename T>
__device__ void store4(T* to, const float (&from)[4], int64_t i, int64_t n, bool vectors) {
  if (vectors && 4 * i + 4 <= n) return store_pack<4>(to + 4 * i, from);
  for (int u = 0; u < 4; ++u) {
    if (4 * i + u < n) to[4 * i + u] = static_cast<T>(from[u]);
  }
}

__global__ void muon_momentum(float* grad, float* buffer, bf16* direction, const float* grad_scale, float momentum,
                              bool zero_grad, int64_t n, bool vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (4 * i >= n) return;
  const float scale = *grad_scale;
  float d[4] = {};
  if (!gated(scale)) {
    float g[4], b[4];
    load4(grad, i, n, vectors, g);
    load4(buffer, i, n, vectors, b);
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

__global__ void muon_apply(float* master, bf16* working, const bf16* orthogonal, const float* grad_scale, float decay,
                           float step_size, int64_t n, bool vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (4 * i >= n || gated(*grad_scale)) return;
  float o[4], w[4];
  load4(orthogonal, i, n, vectors, o);
  load4(master, i, n, vectors, w);
  for (int u = 0; u < 4; ++u) w[u] = decay * w[u] - step_size * o[u];
  store4(master, w, i, n, vectors);
  if (working != nullptr) store4(working, w, i, n, vectors);
}

unsigned blocks_of(int64_t n) { return static_cast<unsigned>((n / 4 + kThreads) / kThreads); }

// Four 16-byte loads in flight a thread; squares and sums in fp64.
__global__ void square_sums(const float* flat, int64_t vectors, int64_t head, int64_t n, double* partial) {
  constexpr int kUnroll = 4;
  const auto* in = reinterpret_cast<const float4*>(flat + head);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  double total = 0.0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors; i += stride * kUnroll) {
    float4 v[kUnroll];
    for (int u = 0; u < kUnroll; ++u) {
      v[u] = i + u * stride < vectors ? __ldcs(in + i + u * stride) : float4{};
    }
    for (int u = 0; u < kUnroll; ++u) {
      const double x = v[u].x, y = v[u].y, z = v[u].z, w = v[u].w;
      total += (x * x + y * y) + (z * z + w * w);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {  // what no vector covers
    for (int64_t i = 0; i < head; ++i) total += double{flat[i]} * flat[i];
    for (int64_t i = head + vectors * 4; i < n; ++i) total += double{flat[i]} * flat[i];
  }
  __shared__ double scratch[32];
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void add_partial(const double* partial, double* total) {
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < kSumBlocks; i += kThreads) sum += partial[i];
  __shared__ double scratch[32];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *total += sum;
}

}  // namespace

void adamw_update_cuda(View master, View working, View grad, View exp_avg, View exp_avg_sq, View grad_scale,
                       const AdamwFactors& factors) {
  launch_typed(exp_avg.bf16, [&]<typename Moment>() {
    const bool vectors = aligned_to(master.data, 16) && aligned_to(grad.data, 16) && aligned_to(working.data, 8) &&
                         aligned_to(exp_avg.data, 4 * sizeof(Moment)) &&
                         aligned_to(exp_avg_sq.data, 4 * sizeof(Moment));
    if (vectors) {
      launch<Moment, 4>(master, working, grad, exp_avg, exp_avg_sq, grad_scale, factors, 0);
    }
    launch<Moment, 1>(master, working, grad, exp_avg, exp_avg_sq, grad_scale, factors,
                      vectors ? master.elements / 4 * 4 : 0);
  });
}

void muon_momentum_cuda(View grad, View momentum_buffer, View direction, View grad_scale, float momentum,
                        bool zero_grad) {
  const bool vectors =
      aligned_to(grad.data, 16) && aligned_to(momentum_buffer.data, 16) && aligned_to(direction.data, 8);
  muon_momentum<<<blocks_of(grad.elements), kThreads, 0, current_stream()>>>(
      grad, momentum_buffer, direction, grad_scale, momentum, zero_grad, grad.elements, vectors);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void muon_apply_cuda(View master, View working, View orthogonal, View grad_scale, float decay, float step_size) {
  const bool vectors = aligned_to(master.data, 16) && aligned_to(working.data, 8) && aligned_to(orthogonal.data, 8);
  muon_apply<<<blocks_of(master.elements), kThreads, 0, current_stream()>>>(master, working, orthogonal, grad_scale,
                                                                            decay, step_size, master.elements, vectors);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void add_sum_of_squares_cuda(View flat, View partial, View total) {
  const int64_t n = flat.elements;
  const int64_t head = min(n, static_cast<int64_t>(-(reinterpret_cast<intptr_t>(flat.data) / 4) & 3));
  square_sums<<<kSumBlocks, kThreads, 0, current_stream()>>>(flat, (n - head) / 4, head, n, partial);
  add_partial<<<1, kThreads, 0, current_stream()>>>(partial, total);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
