#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;

// kSize elements a thread, one access to each array.
template <typename Moment, int kSize>
__global__ void update(Pack<float, kSize>* master, Pack<bf16, kSize>* working,
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
  Pack<bf16, kSize> rounded;
#pragma unroll
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
void launch(const View& master, const View& working, const View& grad, const View& exp_avg,
            const View& exp_avg_sq, const View& grad_scale, const AdamwFactors& factors,
            int64_t first) {
  const int64_t packs = (master.elements - first) / kSize;
  if (packs == 0) return;
  const auto from = [&]<typename T>(T* data) {
    return data == nullptr ? nullptr : reinterpret_cast<Pack<T, kSize>*>(data + first);
  };
  update<Moment, kSize><<<blocks_for(packs, kThreads), kThreads, 0, current_stream()>>>(
      from(static_cast<float*>(master)), from(static_cast<bf16*>(working)),
      from(static_cast<float*>(grad)), from(static_cast<Moment*>(exp_avg)),
      from(static_cast<Moment*>(exp_avg_sq)), grad_scale, factors, packs);
}

}  // namespace

void adamw_update_cuda(View master, View working, View grad, View exp_avg, View exp_avg_sq,
                       View grad_scale, const AdamwFactors& factors) {
  launch_typed(exp_avg.bf16, [&]<typename Moment>() {
    const bool vectors = aligned_to(master.data, 16) && aligned_to(grad.data, 16) &&
                         aligned_to(working.data, 8) &&
                         aligned_to(exp_avg.data, 4 * sizeof(Moment)) &&
                         aligned_to(exp_avg_sq.data, 4 * sizeof(Moment));
    if (vectors) {
      launch<Moment, 4>(master, working, grad, exp_avg, exp_avg_sq, grad_scale, factors, 0);
    }
    launch<Moment, 1>(master, working, grad, exp_avg, exp_avg_sq, grad_scale, factors,
                      vectors ? master.elements / 4 * 4 : 0);
  });
}

}  // namespace marrow
