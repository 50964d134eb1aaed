// The scales of fp8 blocks: the same source for CPU and GPU.
#pragma once
#include <cstdint>

namespace marrow {

constexpr int64_t kFp8Block = 128;

// Of a block whose largest magnitude has these fp32 bits, the bits of the smallest power of two s with 448 · s ≥ it
// (448 is E4M3's largest value), and at least 2^-100: products of two scales stay normal numbers beside any other
// scale. NaN where the block holds an infinity or NaN: all products that read it are NaN then, none saturates.
constexpr uint32_t fp8_scale_bits(uint32_t magnitude) {
  if (magnitude >= 0x7f800000u) return 0x7fc00000u;
  const uint32_t exponent = (magnitude + 0x1fffffu) >> 23;  // one more above 1.75 · 2^e, as 448 is 1.75 · 2^8
  return (exponent > 35u ? exponent - 8u : 27u) << 23;
}

// The bits of 1 / s.
constexpr uint32_t fp8_inverse_bits(uint32_t scale) { return scale >= 0x7f800000u ? scale : (254u << 23) - scale; }

}  // namespace marrow
