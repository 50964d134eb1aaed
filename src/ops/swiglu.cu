#include "ops/kernel_tools.cuh"
#include "ops/swiglu_cuda.h"

namespace marrow {
namespace {

constexpr int kWarps = 8;  // a warp works on a row

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <typename T, int kWidth>
__global__ void forward_kernel(const T* gate_up, const float* row_weight, T* out, int64_t rows,
                               int64_t width) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= rows) return;
  const T* gate_row = gate_up + row * 2 * width;
  const float weight = row_weight == nullptr ? 1.0f : row_weight[row];
#pragma unroll 2
  for (int64_t c = threadIdx.x * kWidth; c < width; c += 32 * kWidth) {
    float gate[kWidth];
    float up[kWidth];
    load_pack<kWidth>(gate_row + c, gate);
    load_pack<kWidth>(gate_row + width + c, up);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) up[j] *= gate[j] * sigmoid(gate[j]) * weight;
    store_pack<kWidth>(out + row * width + c, up);
  }
}

template <typename T, int kWidth>
__global__ void backward_kernel(const T* gate_up, const float* row_weight, const T* d_out,
                                T* d_gate_up, float* d_row_weight, int64_t rows, int64_t width) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= rows) return;
  const T* gate_row = gate_up + row * 2 * width;
  T* d_gate_row = d_gate_up + row * 2 * width;
  const float weight = row_weight == nullptr ? 1.0f : row_weight[row];
  float dot = 0;
#pragma unroll 2
  for (int64_t c = threadIdx.x * kWidth; c < width; c += 32 * kWidth) {
    float gate[kWidth];
    float up[kWidth];
    float grad[kWidth];
    load_pack<kWidth>(gate_row + c, gate);
    load_pack<kWidth>(gate_row + width + c, up);
    load_pack<kWidth>(d_out + row * width + c, grad);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float s = sigmoid(gate[j]);
      const float silu = gate[j] * s;
      dot += grad[j] * silu * up[j];
      gate[j] = grad[j] * weight * up[j] * (s + silu * (1.0f - s));
      up[j] = grad[j] * weight * silu;
    }
    store_pack<kWidth>(d_gate_row + c, gate);
    store_pack<kWidth>(d_gate_row + width + c, up);
  }
  if (d_row_weight == nullptr) return;
  dot = lane_sum<32>(dot);
  if (threadIdx.x == 0) d_row_weight[row] = dot;
}

template <typename T, int kWidth>
void forward(const SwigluArgs& args, void* out, cudaStream_t stream) {
  forward_kernel<T, kWidth><<<(args.rows + kWarps - 1) / kWarps, dim3(32, kWarps), 0, stream>>>(
      static_cast<const T*>(args.gate_up), args.row_weight, static_cast<T*>(out), args.rows,
      args.width);
}

template <typename T, int kWidth>
void backward(const SwigluArgs& args, const void* d_out, void* d_gate_up, float* d_row_weight,
              cudaStream_t stream) {
  backward_kernel<T, kWidth><<<(args.rows + kWarps - 1) / kWarps, dim3(32, kWarps), 0, stream>>>(
      static_cast<const T*>(args.gate_up), args.row_weight, static_cast<const T*>(d_out),
      static_cast<T*>(d_gate_up), d_row_weight, args.rows, args.width);
}

bool wide(const SwigluArgs& args, const void* out, const void* grad) {
  return args.width % (args.bf16 ? 8 : 4) == 0 && aligned_to(args.gate_up, 16) &&
         aligned_to(out, 16) && aligned_to(grad, 16);
}

}  // namespace

void swiglu_forward_cuda(const SwigluArgs& args, void* out, void* stream) {
  const bool packs = wide(args, out, nullptr);
  const auto launch = args.bf16 ? (packs ? forward<bf16, 8> : forward<bf16, 1>)
                                : (packs ? forward<float, 4> : forward<float, 1>);
  launch(args, out, static_cast<cudaStream_t>(stream));
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void swiglu_backward_cuda(const SwigluArgs& args, const void* d_out, void* d_gate_up,
                          float* d_row_weight, void* stream) {
  const bool packs = wide(args, d_out, d_gate_up);
  const auto launch = args.bf16 ? (packs ? backward<bf16, 8> : backward<bf16, 1>)
                                : (packs ? backward<float, 4> : backward<float, 1>);
  launch(args, d_out, d_gate_up, d_row_weight, static_cast<cudaStream_t>(stream));
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
