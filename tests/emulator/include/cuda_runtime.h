// CUDA's language and run-time functions, as far as src/ops uses them.
#pragma once
#include <cuda_runtime_api.h>
#include <math.h>

#include <bit>

#include "emulator/emulator.h"
#include "emulator/ptx.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define threadIdx (::emulator::current->index)
#define blockIdx (::emulator::block_index)
#define blockDim (::emulator::block_size)
#define gridDim (::emulator::grid_size)

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return emulator::take_error(); }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == 9 ? "invalid configuration argument" : "invalid argument";
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Function>
cudaError_t cudaFuncSetAttribute(Function* function, cudaFuncAttribute, size_t bytes) {
  return emulator::allow_shared_memory(reinterpret_cast<const void*>(function), bytes);
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 5;  // few: blocks that take several rows in turn do so
  return cudaSuccess;
}

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
using std::isfinite;
#define __CUDA_ARCH__ 900
// Never a part of a fused product and sum.
inline float __fmul_rn(float a, float b) {
  float product = a * b;
  asm("" : "+x"(product));
  return product;
}
inline float __fadd_rn(float a, float b) {
  float sum = a + b;
  asm("" : "+x"(sum));
  return sum;
}
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
template <typename T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
inline float4 atomicAdd(float4* to, float4 value) {
  const float4 before = *to;
  *to = {before.x + value.x, before.y + value.y, before.z + value.z, before.w + value.w};
  return before;
}

inline void __syncthreads(emulator::Where where = emulator::Where::current()) { emulator::barrier(where); }
inline void __syncwarp(unsigned mask = ~0u, emulator::Where where = emulator::Where::current()) {
  emulator::meet(mask, where);
}

namespace emulator {
// The values of a warp's lanes.
template <typename T>
struct Lanes {
  EMULATOR_OWN Lanes(unsigned mask, T value, Where where) : values(reinterpret_cast<Slot*>(slots())) {
    values[current->lane()].value = value;
    meet(mask, where);
  }
  EMULATOR_OWN T operator[](unsigned lane) const { return values[lane % 32].value; }
  union Slot {
    T value;
    unsigned char bytes[kSlot];
  };
  static_assert(sizeof(T) <= kSlot);
  Slot* values;
};
}  // namespace emulator

template <typename T>
T EMULATOR_OWN __shfl_sync(unsigned mask, T value, int lane, emulator::Where where = emulator::Where::current()) {
  return emulator::Lanes<T>(mask, value, where)[static_cast<unsigned>(lane)];
}
template <typename T>
T EMULATOR_OWN __shfl_xor_sync(unsigned mask, T value, int bits, emulator::Where where = emulator::Where::current()) {
  return emulator::Lanes<T>(mask, value, where)[emulator::current->lane() ^ static_cast<unsigned>(bits)];
}
template <typename T>
T EMULATOR_OWN __shfl_up_sync(unsigned mask, T value, unsigned by, emulator::Where where = emulator::Where::current()) {
  const unsigned lane = emulator::current->lane();
  return emulator::Lanes<T>(mask, value, where)[lane < by ? lane : lane - by];
}
template <typename T>
T EMULATOR_OWN __shfl_down_sync(unsigned mask, T value, unsigned by,
                                emulator::Where where = emulator::Where::current()) {
  const unsigned lane = emulator::current->lane();
  return emulator::Lanes<T>(mask, value, where)[lane + by > 31 ? lane : lane + by];
}
inline unsigned EMULATOR_OWN __ballot_sync(unsigned mask, bool holds,
                                           emulator::Where where = emulator::Where::current()) {
  const emulator::Lanes<bool> lanes(mask, holds, where);
  unsigned all = 0;
  for (unsigned lane = 0; lane < 32; ++lane) all |= unsigned{lanes[lane]} << lane;
  return all;
}
template <typename T>
unsigned EMULATOR_OWN __match_any_sync(unsigned mask, T value, emulator::Where where = emulator::Where::current()) {
  const emulator::Lanes<T> lanes(mask, value, where);
  unsigned all = 0;
  for (unsigned lane = 0; lane < 32; ++lane) all |= unsigned{lanes[lane] == value} << lane;
  return all;
}
template <typename T>
T EMULATOR_OWN __reduce_max_sync(unsigned mask, T value, emulator::Where where = emulator::Where::current()) {
  const emulator::Lanes<T> lanes(mask, value, where);
  for (unsigned lane = 0; lane < 32; ++lane) value = max(value, lanes[lane]);
  return value;
}
template <typename T>
T EMULATOR_OWN __reduce_min_sync(unsigned mask, T value, emulator::Where where = emulator::Where::current()) {
  const emulator::Lanes<T> lanes(mask, value, where);
  for (unsigned lane = 0; lane < 32; ++lane) value = min(value, lanes[lane]);
  return value;
}
