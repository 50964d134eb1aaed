// What kernels share: checks of launches, wide loads and stores, sums over a block and over partial rows. Neither
// torch's headers nor base/error.h come here: nvcc needs 2 s for a plain file and over a minute for one with torch.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "ops/cuda_kernels.h"

// Throws unless `call` returned cudaSuccess. After a launch: MARROW_CUDA_CHECK(cudaGetLastError()).
#define MARROW_CUDA_CHECK(call)                                                                 \
  do {                                                                                          \
    const cudaError_t marrow_status = (call);                                                   \
    if (marrow_status != cudaSuccess) {                                                         \
      ::marrow::throw_cuda_error(#call, cudaGetErrorString(marrow_status), __FILE__, __LINE__); \
    }                                                                                           \
  } while (false)

namespace marrow {

// In op_tools.cpp. The error (kDeviceFault) names the call and CUDA's text.
[[noreturn]] void throw_cuda_error(const char* call, const char* status, const char* file, int line);
cudaStream_t current_stream();  // ATen's

// Loops over constants need no #pragma unroll: the machine code was the same with it.
using bf16 = __nv_bfloat16;

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T items[N];
};

// N consecutive elements as fp32, in accesses of N·sizeof(T) bytes, or 16 if that is less; aligned to those.
template <int N, typename T>
__device__ __forceinline__ void load_pack(const T* from, float (&to)[N]) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
  for (int i = 0; i < N; ++i) to[i] = static_cast<float>(pack.items[i]);
}

template <int N, typename T>
__device__ __forceinline__ void store_pack(T* to, const float (&from)[N]) {
  Pack<T, N> pack;
  for (int i = 0; i < N; ++i) pack.items[i] = static_cast<T>(from[i]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Rows that exist: `rows`, or of experts' rows, whose number the device alone knows, those before the last of
// `offsets`.
struct RowCount {
  int64_t rows;
  const int32_t* end = nullptr;
  RowCount(int64_t all, View offsets) : rows(all) {
    if (offsets.defined()) end = static_cast<const int32_t*>(offsets) + offsets.elements - 1;
  }
  __device__ __forceinline__ bool has(int64_t row) const { return row < rows && (end == nullptr || row < *end); }
};

// Sum over aligned groups of kLanes lanes of a warp; every lane of a group gets it.
template <int kLanes, typename T>
__device__ __forceinline__ T lane_sum(T value) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

// Sum over a block of whole warps, in a fixed order. `scratch` holds a value for each warp: two
// uses in a row with the same scratch need a __syncthreads between them.
template <typename T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
  value = lane_sum<32>(value);
  if (blockDim.x == 32) return value;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  T total = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += scratch[warp];
  return total;
}

// target[c] += Σ_r partials[r · stride + c] for c < columns: 32 warps share the rows of 32 columns,
// always in the same order. Launch with (columns + 31) / 32 blocks of (32, 32).
static __global__ void add_column_sums(const float* partials, int64_t rows, int64_t stride, int64_t columns,
                                       float* target) {
  __shared__ float sums[32][33];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0;
  if (column < columns) {
    for (int64_t row = threadIdx.y; row < rows; row += 32) sum += partials[row * stride + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int warp = 1; warp < 32; ++warp) sum += sums[warp][threadIdx.x];
  target[column] += sum;
}

inline void launch_add_column_sums(const float* partials, int64_t rows, int64_t stride, int64_t columns,
                                   float* target) {
  add_column_sums<<<(columns + 31) / 32, dim3(32, 32), 0, current_stream()>>>(partials, rows, stride, columns, target);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

inline bool aligned_to(const void* pointer, uintptr_t bytes) {
  return pointer == nullptr || reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Whether rows of `width` elements of the views' dtype (the first one's) can be read in packs of 16 bytes.
template <typename... Views>
bool in_packs(int64_t width, const View& first, const Views&... others) {
  return width % (first.bf16 ? 8 : 4) == 0 && aligned_to(first.data, 16) && (aligned_to(others.data, 16) && ...);
}

// Calls launch<T>() for T = bf16 or float.
template <typename Launch>
void launch_typed(bool is_bf16, const Launch& launch) {
  is_bf16 ? launch.template operator()<bf16>() : launch.template operator()<float>();
  MARROW_CUDA_CHECK(cudaGetLastError());
}

// Calls launch<T, N>() for packs of N elements of T: 16 bytes where `packs`, else kElse elements.
template <int kElse = 1, typename Launch>
void launch_packs(bool is_bf16, bool packs, const Launch& launch) {
  if (is_bf16) {
    packs ? launch.template operator()<bf16, 8>() : launch.template operator()<bf16, kElse>();
  } else {
    packs ? launch.template operator()<float, 4>() : launch.template operator()<float, kElse>();
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

inline int multiprocessors() {  // of the current GPU
  int device = 0, count = 0;
  MARROW_CUDA_CHECK(cudaGetDevice(&device));
  MARROW_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

inline unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace marrow
