#include "ops/fp8_rows.cuh"

namespace marrow {
namespace {

constexpr int kWarps = 8;  // a warp works on a row

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// up becomes the result.
template <int kWidth>
__device__ __forceinline__ void activate(const float (&gate)[kWidth], float (&up)[kWidth], float weight) {
  for (int j = 0; j < kWidth; ++j) up[j] *= gate[j] * sigmoid(gate[j]) * weight;
}

// gate and up become their gradients.
template <int kWidth>
__device__ __forceinline__ void differentiate(float (&gate)[kWidth], float (&up)[kWidth], const float (&grad)[kWidth],
                                              float weight, float& dot) {
  for (int j = 0; j < kWidth; ++j) {
    const float s = sigmoid(gate[j]);
    const float silu = gate[j] * s;
    dot += grad[j] * silu * up[j];
    gate[j] = grad[j] * weight * up[j] * (s + silu * (1.0f - s));
    up[j] = grad[j] * weight * silu;
  }
}

template <typename T, int kWidth>
__global__ void forward_kernel(const T* gate_up, const float* row_weight, T* out, RowCount rows, int64_t width) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (!rows.has(row)) return;
  const T* gate_row = gate_up + row * 2 * width;
  const float weight = row_weight == nullptr ? 1.0f : row_weight[row];
#pragma unroll 2
  for (int64_t c = threadIdx.x * kWidth; c < width; c += 32 * kWidth) {
    float gate[kWidth], up[kWidth];
    load_pack<kWidth>(gate_row + c, gate);
    load_pack<kWidth>(gate_row + width + c, up);
    activate(gate, up, weight);
    store_pack<kWidth>(out + row * width + c, up);
  }
}

template <typename T, int kWidth>
__global__ void backward_kernel(const T* gate_up, const float* row_weight, const T* d_out, T* d_gate_up,
                                float* d_row_weight, RowCount rows, int64_t width) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (!rows.has(row)) return;
  const T* gate_row = gate_up + row * 2 * width;
  T* d_gate_row = d_gate_up + row * 2 * width;
  const float weight = row_weight == nullptr ? 1.0f : row_weight[row];
  float dot = 0;
#pragma unroll 2
  for (int64_t c = threadIdx.x * kWidth; c < width; c += 32 * kWidth) {
    float gate[kWidth], up[kWidth], grad[kWidth];
    load_pack<kWidth>(gate_row + c, gate);
    load_pack<kWidth>(gate_row + width + c, up);
    load_pack<kWidth>(d_out + row * width + c, grad);
    differentiate(gate, up, grad, weight, dot);
    store_pack<kWidth>(d_gate_row + c, gate);
    store_pack<kWidth>(d_gate_row + width + c, up);
  }
  if (d_row_weight == nullptr) return;
  dot = lane_sum<32>(dot);
  if (threadIdx.x == 0) d_row_weight[row] = dot;
}

constexpr int kPack = 8;  // elements of a lane in the kernels that write fp8 too

__device__ __forceinline__ Pack<bf16, kPack> rounded(const float (&values)[kPack]) {
  Pack<bf16, kPack> pack;
  for (int i = 0; i < kPack; ++i) pack.items[i] = static_cast<bf16>(values[i]);
  return pack;
}

// As the two above for bf16, with the results' form in fp8: a warp's lanes go on together, past the end with zeros.
__global__ void forward_fp8(const bf16* gate_up, const float* row_weight, bf16* out,
                            const __grid_constant__ Fp8RowWriter fp8, RowCount rows, int64_t width) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (!rows.has(row)) return;
  const bf16* gate_row = gate_up + row * 2 * width;
  const float weight = row_weight == nullptr ? 1.0f : row_weight[row];
  const Fp8Place place = fp8.place(row);
#pragma unroll 2
  for (int64_t first = 0; first < width; first += 32 * kPack) {
    const int64_t c = first + threadIdx.x * kPack;
    float gate[kPack], up[kPack] = {};
    if (c < width) {
      load_pack<kPack>(gate_row + c, gate);
      load_pack<kPack>(gate_row + width + c, up);
      activate(gate, up, weight);
      store_pack<kPack>(out + row * width + c, up);
    }
    fp8.write(place, row, c, rounded(up));
  }
}

__global__ void backward_fp8(const bf16* gate_up, const float* row_weight, const bf16* d_out, bf16* d_gate_up,
                             float* d_row_weight, const __grid_constant__ Fp8RowWriter fp8, RowCount rows,
                             int64_t width) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (!rows.has(row)) return;
  const bf16* gate_row = gate_up + row * 2 * width;
  bf16* d_gate_row = d_gate_up + row * 2 * width;
  const float weight = row_weight == nullptr ? 1.0f : row_weight[row];
  const Fp8Place place = fp8.place(row);
  float dot = 0;
  for (int64_t first = 0; first < width; first += 32 * kPack) {
    const int64_t c = first + threadIdx.x * kPack;
    float gate[kPack] = {}, up[kPack] = {}, grad[kPack];
    if (c < width) {
      load_pack<kPack>(gate_row + c, gate);
      load_pack<kPack>(gate_row + width + c, up);
      load_pack<kPack>(d_out + row * width + c, grad);
      differentiate(gate, up, grad, weight, dot);
      store_pack<kPack>(d_gate_row + c, gate);
      store_pack<kPack>(d_gate_row + width + c, up);
    }
    // Past its end the gate's half must not write into the other's: width is a multiple of blocks, lanes of half warps.
    fp8.write(place, row, c < width ? c : fp8.columns, rounded(gate));
    fp8.write(place, row, width + c, rounded(up));
  }
  if (d_row_weight == nullptr) return;
  dot = lane_sum<32>(dot);
  if (threadIdx.x == 0) d_row_weight[row] = dot;
}

// GPT-OSS: gate and up side by side. Comparisons let NaN through, unlike fminf.
struct Clamp {
  float alpha, limit;
  __device__ float gate(float x) const { return x > limit ? limit : x; }
  __device__ float up(float x) const { return (x > limit ? limit : x < -limit ? -limit : x) + 1.0f; }
};

template <typename T, int kWidth>
__global__ void clamped_forward(const T* gate_up, const float* row_weight, T* out, RowCount rows, int64_t width,
                                Clamp clamp) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (!rows.has(row)) return;
  const float weight = row_weight[row];
  for (int64_t c = threadIdx.x * kWidth; c < width; c += 32 * kWidth) {
    float pairs[2 * kWidth], result[kWidth];
    load_pack<2 * kWidth>(gate_up + 2 * (row * width + c), pairs);
    for (int j = 0; j < kWidth; ++j) {
      const float gate = clamp.gate(pairs[2 * j]);
      result[j] = gate * sigmoid(clamp.alpha * gate) * clamp.up(pairs[2 * j + 1]) * weight;
    }
    store_pack<kWidth>(out + row * width + c, result);
  }
}

template <typename T, int kWidth>
__global__ void clamped_backward(const T* gate_up, const float* row_weight, const T* d_out, T* d_gate_up,
                                 float* d_row_weight, RowCount rows, int64_t width, Clamp clamp) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (!rows.has(row)) return;
  const float weight = row_weight[row];
  float dot = 0;
  for (int64_t c = threadIdx.x * kWidth; c < width; c += 32 * kWidth) {
    float pairs[2 * kWidth], grad[kWidth];
    load_pack<2 * kWidth>(gate_up + 2 * (row * width + c), pairs);
    load_pack<kWidth>(d_out + row * width + c, grad);
    for (int j = 0; j < kWidth; ++j) {
      const float gate = clamp.gate(pairs[2 * j]), up = clamp.up(pairs[2 * j + 1]);
      const float s = sigmoid(clamp.alpha * gate), glu = gate * s, d = grad[j] * weight;
      dot += grad[j] * glu * up;
      pairs[2 * j] = pairs[2 * j] > clamp.limit ? 0.0f : d * up * s * (1.0f + clamp.alpha * gate * (1.0f - s));
      pairs[2 * j + 1] = fabsf(pairs[2 * j + 1]) > clamp.limit ? 0.0f : d * glu;
    }
    store_pack<2 * kWidth>(d_gate_up + 2 * (row * width + c), pairs);
  }
  dot = lane_sum<32>(dot);
  if (threadIdx.x == 0) d_row_weight[row] = dot;
}

}  // namespace

void swiglu_forward_cuda(View gate_up, View row_weight, View out, const ExpertRowsView& of_out) {
  const RowCount rows(out.rows, of_out.offsets);
  if (of_out.data.defined()) {
    forward_fp8<<<blocks_for(out.rows, kWarps), dim3(32, kWarps), 0, current_stream()>>>(
        gate_up, row_weight, out, Fp8RowWriter(of_out, out.width), rows, out.width);
    MARROW_CUDA_CHECK(cudaGetLastError());
    return;
  }
  const bool packs = in_packs(out.width, gate_up, out);
  launch_packs(out.bf16, packs, [&]<typename T, int kWidth>() {
    forward_kernel<T, kWidth><<<blocks_for(out.rows, kWarps), dim3(32, kWarps), 0, current_stream()>>>(
        gate_up, row_weight, out, rows, out.width);
  });
}

void swiglu_backward_cuda(View gate_up, View row_weight, View d_out, View d_gate_up, View d_row_weight,
                          const ExpertRowsView& of_d_gate_up) {
  const RowCount rows(d_out.rows, of_d_gate_up.offsets);
  if (of_d_gate_up.data.defined()) {
    backward_fp8<<<blocks_for(d_out.rows, kWarps), dim3(32, kWarps), 0, current_stream()>>>(
        gate_up, row_weight, d_out, d_gate_up, d_row_weight, Fp8RowWriter(of_d_gate_up, 2 * d_out.width), rows,
        d_out.width);
    MARROW_CUDA_CHECK(cudaGetLastError());
    return;
  }
  const bool packs = in_packs(d_out.width, gate_up, d_out, d_gate_up);
  launch_packs(d_out.bf16, packs, [&]<typename T, int kWidth>() {
    backward_kernel<T, kWidth><<<blocks_for(d_out.rows, kWarps), dim3(32, kWarps), 0, current_stream()>>>(
        gate_up, row_weight, d_out, d_gate_up, d_row_weight, rows, d_out.width);
  });
}

void clamped_swiglu_forward_cuda(View gate_up, View row_weight, View out, View offsets, float alpha, float limit) {
  launch_packs(out.bf16, in_packs(out.width, gate_up, out), [&]<typename T, int kWidth>() {
    clamped_forward<T, kWidth><<<blocks_for(out.rows, kWarps), dim3(32, kWarps), 0, current_stream()>>>(
        gate_up, row_weight, out, RowCount(out.rows, offsets), out.width, Clamp{alpha, limit});
  });
}

void clamped_swiglu_backward_cuda(View gate_up, View row_weight, View d_out, View d_gate_up, View d_row_weight,
                                  View offsets, float alpha, float limit) {
  launch_packs(d_out.bf16, in_packs(d_out.width, gate_up, d_out, d_gate_up), [&]<typename T, int kWidth>() {
    clamped_backward<T, kWidth><<<blocks_for(d_out.rows, kWarps), dim3(32, kWarps), 0, current_stream()>>>(
        gate_up, row_weight, d_out, d_gate_up, d_row_weight, RowCount(d_out.rows, offsets), d_out.width,
        Clamp{alpha, limit});
  });
}

}  // namespace marrow
