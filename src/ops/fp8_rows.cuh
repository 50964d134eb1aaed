// E4M3 in kernels: conversion, and the form of experts' rows (quantize_expert_rows) written by the kernel that makes
// the rows.
#pragma once
#include <cuda_fp8.h>

#include "ops/fp8_scale.h"
#include "ops/kernel_tools.cuh"

namespace marrow {

// Magnitudes of two bf16 in a word.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
__device__ __forceinline__ uint32_t magnitudes(const Pack<bf16, 8>& pack, int pair) {
  return reinterpret_cast<const uint32_t*>(&pack)[pair] & 0x7fff7fffu;
}
__device__ __forceinline__ uint32_t fp32_bits(uint32_t two) {
  return (two >> 16 > (two & 0xffffu) ? two >> 16 : two & 0xffffu) << 16;
}

__device__ __forceinline__ uint32_t to_e4m3(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);  // NaN stays NaN
}

// Eight elements: value(i) · inverse(i).
template <typename Value>
__device__ __forceinline__ uint2 pack_e4m3(const Value& value) {
  return {to_e4m3(value(0), value(1)) | to_e4m3(value(2), value(3)) << 16,
          to_e4m3(value(4), value(5)) | to_e4m3(value(6), value(7)) << 16};
}

// Where the scales of an expert's row are: of block b at first + b · step; a negative first: no expert's row.
struct Fp8Place {
  int64_t first, step;
};
__device__ __forceinline__ Fp8Place place_of_row(const int32_t* offsets, int experts, int64_t row, int64_t columns) {
  int low = 0, high = experts;  // the first expert that ends behind the row
  while (low < high) {
    const int middle = (low + high) / 2;
    if (offsets[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == experts) return {-1, 0};
  const int64_t begin = low == 0 ? 0 : offsets[low - 1];
  return {begin * ((columns + kFp8Block - 1) / kFp8Block) + row - begin, offsets[low] - begin};
}

// Writes the form of rows [R, columns] that warps make, a row that exists each, from left to right.
struct Fp8RowWriter {
  uint8_t* data;
  float* scale;
  const int32_t* offsets;
  int experts;
  int64_t columns;

  Fp8RowWriter(const ExpertRowsView& to, int64_t width)
      : data(to.data), scale(to.scale), offsets(to.offsets), experts(to.offsets.elements), columns(width) {}

  __device__ Fp8Place place(int64_t row) const { return place_of_row(offsets, experts, row, columns); }

  // Eight elements in fp8, and the bits of their block's scale.
  struct Eight {
    uint2 data;
    uint32_t scale;
  };

  // All lanes of a warp call it: 16 of them hold a block.
  __device__ static Eight convert(const Pack<bf16, 8>& values) {
    uint32_t two = 0;
    for (int pair = 0; pair < 4; ++pair) two = larger(two, magnitudes(values, pair));
    for (int step = 8; step > 0; step /= 2) two = larger(two, __shfl_xor_sync(0xffffffffu, two, step));
    const uint32_t scale = fp8_scale_bits(fp32_bits(two));
    const float inverse = __uint_as_float(fp8_inverse_bits(scale));
    return {pack_e4m3([&](int i) { return static_cast<float>(values.items[i]) * inverse; }), scale};
  }
  __device__ void store(Fp8Place at, int64_t row, int64_t column, const Eight& values) const {
    if (column >= columns) return;
    *reinterpret_cast<uint2*>(data + row * columns + column) = values.data;
    if (column % kFp8Block == 0) scale[at.first + column / kFp8Block * at.step] = __uint_as_float(values.scale);
  }
  // All lanes of a warp call it, with eight elements each, as they are in bf16, from `column` on: 8 · lane beyond that
  // of lane 0, which is a multiple of 128. Past the end they are zeros.
  __device__ void write(Fp8Place at, int64_t row, int64_t column, const Pack<bf16, 8>& values) const {
    store(at, row, column, convert(values));
  }
};

}  // namespace marrow
