#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;

// Sum of a block's values, valid in thread 0. Order fixed.
__device__ double block_sum(double x) {
  __shared__ double sums[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.0;
  for (int w = 0; w < kThreads / 32; ++w) x += sums[w];
  return x;
}

// Four 16-byte loads in flight a thread; squares and sums in fp64.
__global__ void square_sums(const float* flat, int64_t vectors, int64_t head, int64_t n,
                            double* partial) {
  constexpr int kUnroll = 4;
  const auto* in = reinterpret_cast<const float4*>(flat + head);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  double total = 0.0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors;
       i += stride * kUnroll) {
    float4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      v[u] = i + u * stride < vectors ? __ldcs(in + i + u * stride) : float4{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const double x = v[u].x, y = v[u].y, z = v[u].z, w = v[u].w;
      total += (x * x + y * y) + (z * z + w * w);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {  // what no vector covers
    for (int64_t i = 0; i < head; ++i) total += double{flat[i]} * flat[i];
    for (int64_t i = head + vectors * 4; i < n; ++i) total += double{flat[i]} * flat[i];
  }
  total = block_sum(total);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void add_partial(const double* partial, double* total) {
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < kSumBlocks; i += kThreads) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *total += sum;
}

}  // namespace

void add_sum_of_squares_cuda(View flat, View partial, View total) {
  const int64_t n = flat.elements;
  const int64_t head =
      min(n, static_cast<int64_t>(-(reinterpret_cast<intptr_t>(flat.data) / 4) & 3));
  square_sums<<<kSumBlocks, kThreads, 0, current_stream()>>>(flat, (n - head) / 4, head, n,
                                                             partial);
  add_partial<<<1, kThreads, 0, current_stream()>>>(partial, total);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
