#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

// A block holds one row in registers: each thread kItems packs of kWidth elements, blockDim.x packs apart.
constexpr int kForwardItems = 4;
// Few, as the backward has three such rows in 64 registers a thread, so that two blocks of kBackwardThreads fill a
// multiprocessor; with the items of a longer row one does.
constexpr int kBackwardItems = 2, kBackwardThreads = 512, kLongRowItems = 8;
constexpr int blocks_at_a_time(int items) { return items == kBackwardItems ? 2 : 1; }

// The first column of a thread's i-th pack.
template <int kWidth>
__device__ __forceinline__ int64_t column(int i) {
  return (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * kWidth;
}

// Zeros past the end; returns the sum of squares.
template <typename T, int kWidth, int kItems>
__device__ float load_row(const T* row, int64_t hidden, float (&values)[kItems][kWidth]) {
  float squares = 0;
  for (int i = 0; i < kItems; ++i) {
    const int64_t c = column<kWidth>(i);
    if (c < hidden) {
      load_pack<kWidth>(row + c, values[i]);
    } else {
      for (int j = 0; j < kWidth; ++j) values[i][j] = 0;
    }
  }
  for (int i = 0; i < kItems; ++i) {
    for (int j = 0; j < kWidth; ++j) squares += values[i][j] * values[i][j];
  }
  return squares;
}

template <typename T, int kWidth>
__global__ void forward_kernel(const T* x, const T* residual, const T* weight, T* sum, T* normed, int64_t hidden,
                               float eps, float offset) {
  constexpr int kItems = kForwardItems;
  __shared__ float scratch[32];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * hidden;
  float values[kItems][kWidth];
  float squares = load_row<T, kWidth, kItems>(x + start, hidden, values);
  if (residual != nullptr) {
    float others[kItems][kWidth];
    load_row<T, kWidth, kItems>(residual + start, hidden, others);
    squares = 0;
    for (int i = 0; i < kItems; ++i) {
      const int64_t c = column<kWidth>(i);
      for (int j = 0; j < kWidth; ++j) {
        values[i][j] = static_cast<float>(static_cast<T>(values[i][j] + others[i][j]));
        squares += values[i][j] * values[i][j];
      }
      if (c < hidden) store_pack<kWidth>(sum + start + c, values[i]);
    }
  }
  const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(hidden) + eps);
  for (int i = 0; i < kItems; ++i) {
    const int64_t c = column<kWidth>(i);
    if (c >= hidden) continue;
    float factor[kWidth];
    load_pack<kWidth>(weight + c, factor);
    for (int j = 0; j < kWidth; ++j) factor[j] = values[i][j] * scale * (factor[j] + offset);
    store_pack<kWidth>(normed + start + c, factor);
  }
}

template <typename T, int kWidth, int kItems>
__global__ void __launch_bounds__(kBackwardThreads, blocks_at_a_time(kItems))
    backward_kernel(const T* x, const T* d_normed, const T* d_sum, const T* weight, T* dx, float* partials,
                    int64_t rows, int64_t hidden, float eps, float offset) {
  __shared__ float scratch[2][64];
  float d_weight[kItems][kWidth] = {};
  int turn = 0;  // alternating scratch: one barrier per row
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const int64_t start = row * hidden;
    float values[kItems][kWidth], grads[kItems][kWidth];
    float squares = load_row<T, kWidth, kItems>(x + start, hidden, values);
    load_row<T, kWidth, kItems>(d_normed + start, hidden, grads);
    float dot = 0;
    for (int i = 0; i < kItems; ++i) {
      const int64_t c = column<kWidth>(i);
      if (c >= hidden) continue;
      float factor[kWidth];
      load_pack<kWidth>(weight + c, factor);
      for (int j = 0; j < kWidth; ++j) dot += grads[i][j] * (factor[j] + offset) * values[i][j];
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
    for (int i = 0; i < kItems; ++i) {
      const int64_t c = column<kWidth>(i);
      if (c >= hidden) continue;
      float factor[kWidth], through[kWidth] = {};
      load_pack<kWidth>(weight + c, factor);
      if (d_sum != nullptr) load_pack<kWidth>(d_sum + start + c, through);
      for (int j = 0; j < kWidth; ++j) {
        d_weight[i][j] += grads[i][j] * values[i][j] * scale;
        through[j] += scale * (grads[i][j] * (factor[j] + offset) - values[i][j] * shift);
      }
      store_pack<kWidth>(dx + start + c, through);
    }
  }
  float* partial = partials + static_cast<int64_t>(blockIdx.x) * hidden;
  for (int i = 0; i < kItems; ++i) {
    for (int j = 0; j < kWidth; ++j) {
      const int64_t c = column<kWidth>(i) + j;
      if (c < hidden) partial[c] = d_weight[i][j];
    }
  }
}

unsigned threads_for(int64_t hidden, int columns, int64_t most) {
  const int64_t threads = (hidden + 32 * columns - 1) / (32 * columns) * 32;
  if (threads > most) {
    throw_cuda_error("rms_norm", "rows are too long: lower hidden_size in config.json", __FILE__, __LINE__);
  }
  return static_cast<unsigned>(threads);
}

// As many blocks as fit the GPU at a time, each with a row of partials; → their number. (Another kind of GPU adds the
// weight's gradient in another order.)
template <typename T, int kWidth, int kItems>
int64_t launch_backward(View x, View d_normed, View d_sum, View weight, View dx, View partials, float eps,
                        float offset) {
  const unsigned threads = threads_for(x.width, kWidth * kItems, kBackwardThreads);
  const int64_t blocks =
      min(partials.rows, int64_t{multiprocessors()} * (blocks_at_a_time(kItems) * kBackwardThreads / threads));
  backward_kernel<T, kWidth, kItems><<<static_cast<unsigned>(blocks), threads, 0, current_stream()>>>(
      x, d_normed, d_sum, weight, dx, partials, x.rows, x.width, eps, offset);
  return blocks;
}

}  // namespace

void rms_norm_forward_cuda(View x, View residual, View weight, View sum, View normed, float eps, float offset) {
  const bool packs = in_packs(x.width, x, residual, weight, sum, normed);
  launch_packs(x.bf16, packs, [&]<typename T, int kWidth>() {
    forward_kernel<T, kWidth><<<x.rows, threads_for(x.width, kWidth * kForwardItems, 1024), 0, current_stream()>>>(
        x, residual, weight, sum, normed, x.width, eps, offset);
  });
}

void rms_norm_backward_cuda(View x, View d_normed, View d_sum, View weight, View dx, View partials, View weight_grad,
                            float eps, float offset) {
  const bool packs = in_packs(x.width, x, weight, d_normed, d_sum, dx);
  int64_t blocks = 0;
  launch_packs(x.bf16, packs, [&]<typename T, int kWidth>() {
    const bool is_long = x.width > int64_t{kWidth} * kBackwardItems * kBackwardThreads;
    const auto launch =
        is_long ? launch_backward<T, kWidth, kLongRowItems> : launch_backward<T, kWidth, kBackwardItems>;
    blocks = launch(x, d_normed, d_sum, weight, dx, partials, eps, offset);
  });
  if (!weight_grad.defined()) return;
  launch_add_column_sums(partials, blocks, x.width, x.width, weight_grad);
}

}  // namespace marrow
