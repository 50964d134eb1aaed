#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kWarps = 8;  // a warp works on a row

// The expert of a row: the first whose offset, the end of its rows, is beyond it. `experts` for a row of none.
__device__ int expert_of(const int* offsets, int experts, int64_t row) {
  int low = 0, high = experts;
  while (low < high) {
    const int middle = (low + high) / 2;
    offsets[middle] > row ? high = middle : low = middle + 1;
  }
  return low;
}

template <typename T, int kWidth>
__global__ void add_bias(T* rows, const T* bias, const int* offsets, const float* row_weights, int64_t count,
                         int64_t width, int experts) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= count) return;
  const int expert = expert_of(offsets, experts, row);
  if (expert == experts) return;
  const float weight = row_weights == nullptr ? 1.0f : row_weights[row];
  for (int64_t c = threadIdx.x * kWidth; c < width; c += 32 * kWidth) {
    float values[kWidth], added[kWidth];
    load_pack<kWidth>(rows + row * width + c, values);
    load_pack<kWidth>(bias + expert * width + c, added);
    for (int j = 0; j < kWidth; ++j) values[j] += weight * added[j];
    store_pack<kWidth>(rows + row * width + c, values);
  }
}

template <typename T, int kWidth>
__global__ void row_weight_grad(const T* d_rows, const T* bias, const int* offsets, float* d_row_weights, int64_t count,
                                int64_t width, int experts) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= count) return;
  const int expert = expert_of(offsets, experts, row);
  float dot = 0;
  for (int64_t c = threadIdx.x * kWidth; expert < experts && c < width; c += 32 * kWidth) {
    float grad[kWidth], added[kWidth];
    load_pack<kWidth>(d_rows + row * width + c, grad);
    load_pack<kWidth>(bias + expert * width + c, added);
    for (int j = 0; j < kWidth; ++j) dot += grad[j] * added[j];
  }
  dot = lane_sum<32>(dot);
  if (threadIdx.x == 0) d_row_weights[row] = dot;
}

// A block sums 32 packs of columns of one expert (blockIdx.y); its warps take rows in turn.
constexpr int kSumWarps = 16;

template <typename T, int kWidth>
__global__ void bias_grad(const T* d_rows, const float* row_weights, const int* offsets, float* grad, int64_t width) {
  const int64_t expert = blockIdx.y, last = offsets[expert];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * kWidth;
  float sum[kWidth] = {};
#pragma unroll 4
  for (int64_t row = (expert == 0 ? 0 : offsets[expert - 1]) + threadIdx.y; row < last; row += kSumWarps) {
    if (column >= width) break;
    float values[kWidth];
    load_pack<kWidth>(d_rows + row * width + column, values);
    const float weight = row_weights == nullptr ? 1.0f : row_weights[row];
    for (int j = 0; j < kWidth; ++j) sum[j] += weight * values[j];
  }
  __shared__ float sums[kSumWarps][kWidth][32];
  for (int j = 0; j < kWidth; ++j) sums[threadIdx.y][j][threadIdx.x] = sum[j];
  __syncthreads();
  if (threadIdx.y >= kWidth || column >= width) return;
  float total = 0;
  for (int warp = 0; warp < kSumWarps; ++warp) total += sums[warp][threadIdx.y][threadIdx.x];
  grad[expert * width + column + threadIdx.y] += total;
}

}  // namespace

void add_expert_bias_cuda(View rows, View bias, View offsets, View row_weights) {
  launch_packs(rows.bf16, in_packs(rows.width, rows, bias), [&]<typename T, int kWidth>() {
    add_bias<T, kWidth><<<blocks_for(rows.rows, kWarps), dim3(32, kWarps), 0, current_stream()>>>(
        rows, bias, offsets, row_weights, rows.rows, rows.width, static_cast<int>(offsets.elements));
  });
}

void expert_bias_row_weight_grad_cuda(View d_rows, View bias, View offsets, View d_row_weights) {
  launch_packs(d_rows.bf16, in_packs(d_rows.width, d_rows, bias), [&]<typename T, int kWidth>() {
    row_weight_grad<T, kWidth><<<blocks_for(d_rows.rows, kWarps), dim3(32, kWarps), 0, current_stream()>>>(
        d_rows, bias, offsets, d_row_weights, d_rows.rows, d_rows.width, static_cast<int>(offsets.elements));
  });
}

void expert_bias_grad_cuda(View d_rows, View row_weights, View offsets, View grad) {
  launch_packs(d_rows.bf16, in_packs(d_rows.width, d_rows), [&]<typename T, int kWidth>() {
    const dim3 blocks(blocks_for(d_rows.width, 32 * kWidth), static_cast<unsigned>(offsets.elements));
    bias_grad<T, kWidth>
        <<<blocks, dim3(32, kSumWarps), 0, current_stream()>>>(d_rows, row_weights, offsets, grad, d_rows.width);
  });
}

}  // namespace marrow
