#pragma once
#include <cuda_runtime.h>

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  __nv_bfloat16(float value) {  // to nearest even
    const unsigned word = std::bit_cast<unsigned>(value);
    bits = static_cast<unsigned short>(value != value ? 0x7fffu : (word + 0x7fffu + (word >> 16 & 1u)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(unsigned{bits} << 16); }
  unsigned short bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline float __bfloat162float(__nv_bfloat16 value) { return value; }
