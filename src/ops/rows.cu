#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;

// One warp a row; eight 16-byte loads in flight a lane.
template <typename Vector>
__global__ void gather(const Vector* x, const int32_t* source, Vector* out, int64_t count, int64_t width) {
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

// A block's y index is a token; each thread sums one pack of columns over the token's rows.
template <typename T, int kSize>
__global__ void sum(const T* rows, const int32_t* rows_of_source, const T* residual, T* out, int64_t count,
                    int64_t sources, int64_t row_count, int64_t width) {
  using Packed = Pack<T, kSize>;
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= count) return;
  const int32_t* indices = rows_of_source + token * sources;
  for (int64_t column = int64_t{threadIdx.x} * kSize; column < width; column += int64_t{blockDim.x} * kSize) {
    float totals[kSize] = {};
    if (residual != nullptr) {
      load_pack<kSize>(residual + token * width + column, totals);
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
        for (int i = 0; i < kSize; ++i) totals[i] += static_cast<float>(loaded[u].items[i]);
      }
    }
    store_pack<kSize>(out + token * width + column, totals);
  }
}

__global__ void gather_scalars(const float* values, const int32_t* index, float* out, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int32_t from = index[i];
  out[i] = from >= 0 ? values[from] : 0.0f;
}

}  // namespace

void gather_rows_cuda(View x, View source, View out) {
  if (out.elements == 0) return;
  const int64_t bytes = out.width * (x.bf16 ? 2 : 4);
  const auto launch = [&]<typename Vector>(Vector) {
    gather<Vector><<<blocks_for(out.rows * 32, kThreads), kThreads, 0, current_stream()>>>(
        x, source, out, out.rows, bytes / static_cast<int64_t>(sizeof(Vector)));
  };
  if (bytes % 16 == 0 && aligned_to(x.data, 16) && aligned_to(out.data, 16)) {
    launch(uint4{});
  } else if (x.bf16) {
    launch(static_cast<unsigned short>(0));
  } else {
    launch(uint32_t{});
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void sum_rows_cuda(View rows, View rows_of_source, View residual, View out) {
  if (out.elements == 0) return;
  const bool packs = in_packs(out.width, rows, out, residual);
  launch_packs(rows.bf16, packs, [&]<typename T, int kSize>() {
    unsigned columns = 32;
    while (columns < kThreads && columns * kSize < out.width) columns *= 2;
    const dim3 block(columns, kThreads / columns);
    sum<T, kSize><<<blocks_for(out.rows, block.y), block, 0, current_stream()>>>(
        rows, rows_of_source, residual, out, out.rows, rows_of_source.width, rows.rows, out.width);
  });
}

void gather_values_cuda(View values, View index, View out) {
  if (index.elements == 0) return;
  gather_scalars<<<blocks_for(index.elements, kThreads), kThreads, 0, current_stream()>>>(values, index, out,
                                                                                          index.elements);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
