#include "ops/kernel_tools.cuh"
#include "ops/rms_norm_cuda.h"

namespace marrow {
namespace {

// A block holds one row in registers: each thread kItems packs of kWidth elements, blockDim.x packs
// apart.
constexpr int kItems = 4;

template <typename T, int kWidth>
__device__ float load_row(const T* row, int64_t hidden, float (&values)[kItems][kWidth]) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t c = (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * kWidth;
    if (c < hidden) {
      load_pack<kWidth>(row + c, values[i]);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[i][j] = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) squares += values[i][j] * values[i][j];
  }
  return squares;
}

template <typename T, int kWidth>
__global__ void forward_kernel(const T* x, const T* residual, const T* weight, T* sum, T* normed,
                               int64_t hidden, float eps) {
  __shared__ float scratch[32];
  const int64_t offset = static_cast<int64_t>(blockIdx.x) * hidden;
  float values[kItems][kWidth];
  float squares = load_row<T, kWidth>(x + offset, hidden, values);
  if (residual != nullptr) {
    float others[kItems][kWidth];
    load_row<T, kWidth>(residual + offset, hidden, others);
    squares = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t c = (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * kWidth;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values[i][j] = static_cast<float>(static_cast<T>(values[i][j] + others[i][j]));
        squares += values[i][j] * values[i][j];
      }
      if (c < hidden) store_pack<kWidth>(sum + offset + c, values[i]);
    }
  }
  const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(hidden) + eps);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t c = (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * kWidth;
    if (c >= hidden) continue;
    float factor[kWidth];
    load_pack<kWidth>(weight + c, factor);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) factor[j] = values[i][j] * scale * factor[j];
    store_pack<kWidth>(normed + offset + c, factor);
  }
}

template <typename T, int kWidth>
__global__ void backward_kernel(const T* x, const T* d_normed, const T* d_sum, const T* weight,
                                T* dx, float* partials, int64_t rows, int64_t hidden, float eps) {
  __shared__ float scratch[2][64];
  float d_weight[kItems][kWidth] = {};
  int turn = 0;  // alternating scratch: one barrier per row
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const int64_t offset = row * hidden;
    float values[kItems][kWidth];
    float grads[kItems][kWidth];
    float squares = load_row<T, kWidth>(x + offset, hidden, values);
    load_row<T, kWidth>(d_normed + offset, hidden, grads);
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t c = (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * kWidth;
      if (c >= hidden) continue;
      float factor[kWidth];
      load_pack<kWidth>(weight + c, factor);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dot += grads[i][j] * factor[j] * values[i][j];
    }
    squares = lane_sum<32>(squares);
    dot = lane_sum<32>(dot);
    if (blockDim.x > 32) {
      if (threadIdx.x % 32 == 0) {
        scratch[turn][threadIdx.x / 32] = squares;
        scratch[turn][threadIdx.x / 32 + 32] = dot;
      }
      __syncthreads();
      squares = dot = 0;
      for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
        squares += scratch[turn][warp];
        dot += scratch[turn][warp + 32];
      }
    }
    const float scale = 1.0f / sqrtf(squares / static_cast<float>(hidden) + eps);
    const float shift = dot * scale * scale / static_cast<float>(hidden);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t c = (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * kWidth;
      if (c >= hidden) continue;
      float factor[kWidth];
      float through[kWidth] = {};
      load_pack<kWidth>(weight + c, factor);
      if (d_sum != nullptr) load_pack<kWidth>(d_sum + offset + c, through);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        d_weight[i][j] += grads[i][j] * values[i][j] * scale;
        through[j] += scale * (grads[i][j] * factor[j] - values[i][j] * shift);
      }
      store_pack<kWidth>(dx + offset + c, through);
    }
  }
  float* partial = partials + static_cast<int64_t>(blockIdx.x) * hidden;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int64_t c = (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * kWidth + j;
      if (c < hidden) partial[c] = d_weight[i][j];
    }
  }
}

unsigned threads_for(int64_t hidden, int width) {
  const int64_t per_warp = 32 * kItems * width;
  const int64_t threads = (hidden + per_warp - 1) / per_warp * 32;
  if (threads > 1024) {
    throw_cuda_error("rms_norm", "rows are too long: lower hidden_size in config.json", __FILE__,
                     __LINE__);
  }
  return static_cast<unsigned>(threads);
}

template <typename T, int kWidth>
void forward(const RmsNormArgs& args, void* sum, void* normed, cudaStream_t stream) {
  forward_kernel<T, kWidth><<<args.rows, threads_for(args.hidden, kWidth), 0, stream>>>(
      static_cast<const T*>(args.x), static_cast<const T*>(args.residual),
      static_cast<const T*>(args.weight), static_cast<T*>(sum), static_cast<T*>(normed),
      args.hidden, args.eps);
}

template <typename T, int kWidth>
void backward(const RmsNormArgs& args, const void* d_normed, const void* d_sum, void* dx,
              float* partials, int64_t blocks, cudaStream_t stream) {
  backward_kernel<T, kWidth><<<blocks, threads_for(args.hidden, kWidth), 0, stream>>>(
      static_cast<const T*>(args.x), static_cast<const T*>(d_normed), static_cast<const T*>(d_sum),
      static_cast<const T*>(args.weight), static_cast<T*>(dx), partials, args.rows, args.hidden,
      args.eps);
}

template <typename... Pointers>
bool wide(const RmsNormArgs& args, Pointers... pointers) {
  return args.hidden % (args.bf16 ? 8 : 4) == 0 && aligned_to(args.x, 16) &&
         aligned_to(args.residual, 16) && aligned_to(args.weight, 16) &&
         (aligned_to(pointers, 16) && ...);
}

}  // namespace

void rms_norm_forward_cuda(const RmsNormArgs& args, void* sum, void* normed, void* stream) {
  const bool packs = wide(args, sum, normed);
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.bf16) {
    (packs ? forward<bf16, 8> : forward<bf16, 1>)(args, sum, normed, cuda_stream);
  } else {
    (packs ? forward<float, 4> : forward<float, 1>)(args, sum, normed, cuda_stream);
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void rms_norm_backward_cuda(const RmsNormArgs& args, const void* d_normed, const void* d_sum,
                            void* dx, float* partials, int64_t blocks, float* weight_grad,
                            void* stream) {
  const bool packs = wide(args, d_normed, d_sum, static_cast<const void*>(dx));
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  const auto launch = args.bf16 ? (packs ? backward<bf16, 8> : backward<bf16, 1>)
                                : (packs ? backward<float, 4> : backward<float, 1>);
  launch(args, d_normed, d_sum, dx, partials, blocks, cuda_stream);
  MARROW_CUDA_CHECK(cudaGetLastError());
  if (weight_grad == nullptr) return;
  launch_add_column_sums(partials, blocks, args.hidden, args.hidden, weight_grad, cuda_stream);
}

}  // namespace marrow
