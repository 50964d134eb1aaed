#include "ops/cuda_check.cuh"
#include "ops/rows_cuda.h"

namespace marrow {
namespace {

constexpr int kThreads = 256;

// One warp a row; eight 16-byte loads in flight a lane.
template <typename Vector>
__global__ void gather(const Vector* x, const int32_t* source, Vector* out, int64_t count,
                       int64_t width) {
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (row >= count) return;
  const int64_t from = source[row];
  const int lane = threadIdx.x % 32;
  const Vector* in = x + from * width;
  out += row * width;
  constexpr int kUnroll = 8;
  for (int64_t base = lane; base < width; base += 32 * kUnroll) {
    Vector values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * 32;
      values[u] = from >= 0 && i < width ? __ldg(in + i) : Vector{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * 32;
      if (i < width) __stcs(out + i, values[u]);
    }
  }
}

template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T values[kSize];
};

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void store(float* to, float x) { *to = x; }
__device__ void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

// A block's y index is a token; each thread sums one pack of columns over the token's rows.
template <typename T, int kSize>
__global__ void sum(const T* rows, const int32_t* rows_of_source, const T* residual, T* out,
                    int64_t count, int64_t sources, int64_t row_count, int64_t width) {
  using Packed = Pack<T, kSize>;
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= count) return;
  const int32_t* indices = rows_of_source + token * sources;
  for (int64_t column = int64_t{threadIdx.x} * kSize; column < width;
       column += int64_t{blockDim.x} * kSize) {
    float totals[kSize] = {};
    if (residual != nullptr) {
      const Packed first = *reinterpret_cast<const Packed*>(residual + token * width + column);
#pragma unroll
      for (int i = 0; i < kSize; ++i) totals[i] = to_float(first.values[i]);
    }
    constexpr int kUnroll = 8;
    for (int64_t j0 = 0; j0 < sources; j0 += kUnroll) {
      Packed loaded[kUnroll];
      bool valid[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t index = j0 + u < sources ? __ldg(indices + j0 + u) : -1;
        valid[u] = index >= 0 && index < row_count;
        if (valid[u]) loaded[u] = *reinterpret_cast<const Packed*>(rows + index * width + column);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (!valid[u]) continue;
#pragma unroll
        for (int i = 0; i < kSize; ++i) totals[i] += to_float(loaded[u].values[i]);
      }
    }
    Packed result;
#pragma unroll
    for (int i = 0; i < kSize; ++i) store(&result.values[i], totals[i]);
    *reinterpret_cast<Packed*>(out + token * width + column) = result;
  }
}

template <typename T, int kSize>
void launch_sum(const void* rows, const int32_t* rows_of_source, const void* residual, void* out,
                int64_t count, int64_t sources, int64_t row_count, int64_t width,
                cudaStream_t stream) {
  unsigned columns = 32;
  while (columns < kThreads && columns * kSize < width) columns *= 2;
  const dim3 block(columns, kThreads / columns);
  const auto blocks = static_cast<unsigned>((count + block.y - 1) / block.y);
  sum<T, kSize><<<blocks, block, 0, stream>>>(static_cast<const T*>(rows), rows_of_source,
                                              static_cast<const T*>(residual), static_cast<T*>(out),
                                              count, sources, row_count, width);
}

__global__ void gather_scalars(const float* values, const int32_t* index, float* out,
                               int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int32_t from = index[i];
  out[i] = from >= 0 ? values[from] : 0.0f;
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

void gather_rows_cuda(const void* x, const int32_t* source, void* out, int64_t count, int64_t width,
                      int64_t element_size, void* stream) {
  if (count == 0 || width == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto blocks = static_cast<unsigned>((count * 32 + kThreads - 1) / kThreads);
  const int64_t bytes = width * element_size;
  const auto launch = [&]<typename Vector>(Vector) {
    gather<Vector><<<blocks, kThreads, 0, cuda_stream>>>(
        static_cast<const Vector*>(x), source, static_cast<Vector*>(out), count,
        bytes / static_cast<int64_t>(sizeof(Vector)));
  };
  if (bytes % 16 == 0 && aligned(x) && aligned(out)) {
    launch(uint4{});
  } else if (element_size == 4) {
    launch(uint32_t{});
  } else {
    launch(static_cast<unsigned short>(0));
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void sum_rows_cuda(const void* rows, const int32_t* rows_of_source, const void* residual, void* out,
                   int64_t count, int64_t sources, int64_t row_count, int64_t width, bool bf16,
                   void* stream) {
  if (count == 0 || width == 0) return;
  const bool vectors =
      width % (bf16 ? 8 : 4) == 0 && aligned(rows) && aligned(out) && aligned(residual);
  const auto launch = bf16 ? (vectors ? launch_sum<__nv_bfloat16, 8> : launch_sum<__nv_bfloat16, 1>)
                           : (vectors ? launch_sum<float, 4> : launch_sum<float, 1>);
  launch(rows, rows_of_source, residual, out, count, sources, row_count, width,
         static_cast<cudaStream_t>(stream));
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void gather_values_cuda(const float* values, const int32_t* index, float* out, int64_t count,
                        void* stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  gather_scalars<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(values, index, out,
                                                                             count);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
