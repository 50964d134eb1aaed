#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256, kElements = 8;  // of a row, for each of its 16 or 32 lanes

// A lane's elements of a row: packs of W, kLanes packs apart.
template <int W, int kLanes>
struct Row {
  static constexpr int kRows = kThreads / kLanes;  // of a block at a time
  int64_t size;

  __device__ int64_t column(int pack) const { return (static_cast<int64_t>(pack) * kLanes + threadIdx.x % kLanes) * W; }
  template <typename T>
  __device__ void load(const T* row, float (&to)[kElements]) const {
    for (int p = 0; p < kElements / W; ++p) {
      float pack[W] = {};
      if (column(p) < size) load_pack<W>(row + column(p), pack);
      for (int i = 0; i < W; ++i) to[p * W + i] = pack[i];
    }
  }
  template <typename T>
  __device__ void store(T* row, const float (&from)[kElements]) const {
    for (int p = 0; p < kElements / W; ++p) {
      float pack[W];
      for (int i = 0; i < W; ++i) pack[i] = from[p * W + i];
      if (column(p) < size) store_pack<W>(row + column(p), pack);
    }
  }
  // 1 / √(mean(x²) + eps)
  __device__ float inverse_rms(const float (&x)[kElements], float eps) const {
    float squares = 0;
    for (float value : x) squares += value * value;
    return 1.0f / sqrtf(lane_sum<kLanes>(squares) / static_cast<float>(size) + eps);
  }
};

__device__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <typename T, int W, int kLanes>
__global__ void __launch_bounds__(kThreads)
    forward(const T* x, const T* gate, const T* weight, T* out, int64_t rows, int64_t size, float eps) {
  const Row<W, kLanes> row{size};
  const int64_t index = static_cast<int64_t>(blockIdx.x) * row.kRows + threadIdx.x / kLanes;
  const int64_t at = min(index, rows - 1) * size;  // all lanes take part in the sum
  float values[kElements], gates[kElements], factors[kElements];
  row.load(x + at, values);
  row.load(gate + at, gates);
  row.load(weight, factors);
  const float scale = row.inverse_rms(values, eps);
  for (int i = 0; i < kElements; ++i) values[i] *= scale * factors[i] * gates[i] * sigmoid(gates[i]);
  if (index < rows) row.store(out + at, values);
}

template <typename T, int W, int kLanes>
__global__ void __launch_bounds__(kThreads)
    backward(const T* x, const T* gate, const T* weight, const T* d_out, T* dx, T* d_gate, float* partials,
             int64_t rows, int64_t size, float eps) {
  const Row<W, kLanes> row{size};
  __shared__ float sums[kThreads * kElements];
  float factors[kElements], d_weight[kElements] = {};
  row.load(weight, factors);
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * row.kRows; first < rows; first += gridDim.x * row.kRows) {
    const int64_t index = first + threadIdx.x / kLanes, at = min(index, rows - 1) * size;
    float values[kElements], gates[kElements], grads[kElements];
    row.load(x + at, values);
    row.load(gate + at, gates);
    row.load(d_out + at, grads);
    const float scale = row.inverse_rms(values, eps);
    float dot = 0;
    for (int i = 0; i < kElements; ++i) {
      const float s = sigmoid(gates[i]), silu = gates[i] * s, unit = values[i] * scale;
      gates[i] = grads[i] * unit * factors[i] * (s + silu * (1.0f - s));
      if (index < rows) d_weight[i] += grads[i] * silu * unit;
      grads[i] *= silu * factors[i];
      dot += grads[i] * unit;
    }
    const float shift = lane_sum<kLanes>(dot) * scale / static_cast<float>(size);
    for (int i = 0; i < kElements; ++i) values[i] = scale * (grads[i] - values[i] * shift);
    if (index >= rows) continue;
    row.store(dx + at, values);
    row.store(d_gate + at, gates);
  }
  for (int i = 0; i < kElements; ++i) sums[threadIdx.x * kElements + i] = d_weight[i];
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  for (int p = 0; p < kElements / W; ++p) {
    for (int i = 0; i < W && row.column(p) + i < size; ++i) {
      float sum = 0;
      for (int r = 0; r < row.kRows; ++r) sum += sums[(r * kLanes + threadIdx.x) * kElements + p * W + i];
      partials[blockIdx.x * size + row.column(p) + i] = sum;
    }
  }
}

// Calls launch<T, W, kLanes>(): packs of W elements.
template <typename Launch>
void launch_rows(bool is_bf16, bool packs, int64_t size, const Launch& launch) {
  launch_packs(is_bf16, packs, [&]<typename T, int W>() {
    size <= 16 * kElements ? launch.template operator()<T, W, 16>() : launch.template operator()<T, W, 32>();
  });
}

}  // namespace

void gated_rms_norm_forward_cuda(View x, View gate, View weight, View out, float eps) {
  launch_rows(x.bf16, in_packs(x.width, x, gate, weight, out), x.width, [&]<typename T, int W, int kLanes>() {
    forward<T, W, kLanes><<<blocks_for(x.rows, Row<W, kLanes>::kRows), kThreads, 0, current_stream()>>>(
        x, gate, weight, out, x.rows, x.width, eps);
  });
}

void gated_rms_norm_backward_cuda(View x, View gate, View weight, View d_out, View dx, View d_gate, View partials,
                                  View weight_grad, float eps) {
  launch_rows(x.bf16, in_packs(x.width, x, gate, weight, d_out, dx, d_gate), x.width,
              [&]<typename T, int W, int kLanes>() {
                backward<T, W, kLanes><<<partials.rows, kThreads, 0, current_stream()>>>(
                    x, gate, weight, d_out, dx, d_gate, partials, x.rows, x.width, eps);
              });
  if (weight_grad.defined()) launch_add_column_sums(partials, partials.rows, x.width, x.width, weight_grad);
}

}  // namespace marrow
