#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

__device__ float2 unpack(uint32_t two) { return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)}; }

__device__ float4 plus(float4 a, uint32_t low, uint32_t high) {
  const float2 x = unpack(low), y = unpack(high);
  return {a.x + x.x, a.y + x.y, a.z + y.x, a.w + y.y};
}

// 16 elements a thread: six 16-byte loads in flight.
__global__ void add_vectors(float4* accumulator, const uint4* addend, int64_t vectors) {
  const int64_t i = (int64_t{blockIdx.x} * 2) * blockDim.x + threadIdx.x;
  const int64_t j = i + blockDim.x;
  if (i >= vectors) return;
  const bool two = j < vectors;
  const uint4 a = __ldcs(addend + i);
  const uint4 b = two ? __ldcs(addend + j) : uint4{};
  const float4 c0 = __ldcs(accumulator + 2 * i), c1 = __ldcs(accumulator + 2 * i + 1);
  const float4 d0 = two ? __ldcs(accumulator + 2 * j) : float4{};
  const float4 d1 = two ? __ldcs(accumulator + 2 * j + 1) : float4{};
  __stcs(accumulator + 2 * i, plus(c0, a.x, a.y));
  __stcs(accumulator + 2 * i + 1, plus(c1, a.z, a.w));
  if (!two) return;
  __stcs(accumulator + 2 * j, plus(d0, b.x, b.y));
  __stcs(accumulator + 2 * j + 1, plus(d1, b.z, b.w));
}

__global__ void add_elements(float* accumulator, const bf16* addend, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) accumulator[i] += __bfloat162float(addend[i]);
}

}  // namespace

void add_bf16_to_fp32_cuda(View accumulator, View addend) {
  float* to = accumulator;
  const bf16* from = addend;
  const bool aligned = aligned_to(to, 16) && aligned_to(from, 16);
  const int64_t vectors = aligned ? accumulator.elements / 8 : 0;
  if (vectors > 0) {
    add_vectors<<<blocks_for(vectors, 512), 256, 0, current_stream()>>>(reinterpret_cast<float4*>(to),
                                                                        reinterpret_cast<const uint4*>(from), vectors);
  }
  const int64_t done = vectors * 8, rest = accumulator.elements - done;
  if (rest > 0) {
    add_elements<<<blocks_for(rest, 256), 256, 0, current_stream()>>>(to + done, from + done, rest);
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
