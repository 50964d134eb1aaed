#pragma once
#include <cuda_runtime.h>

enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };

namespace emulator {
// To nearest even, beyond the range to its end.
inline unsigned e4m3_of(float value) {
  const unsigned sign = std::signbit(value) ? 0x80u : 0u;
  const float size = fabsf(value);
  if (value != value) return 0x7fu | sign;
  if (size >= 448.0f) return 0x7eu | sign;
  // The values are multiples of 2^-9, eight of each power of two from 2^-6 on.
  const int exponent = max(size == 0.0f ? -6 : ilogbf(size), -6);
  const auto steps = static_cast<unsigned>(nearbyintf(ldexpf(size, 3 - exponent)));  // 0 to 16
  return sign | (static_cast<unsigned>(exponent + 6) * 8 + steps);
}
}  // namespace emulator

// The first in the low byte.
inline unsigned short __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t, __nv_fp8_interpretation_t) {
  return static_cast<unsigned short>(emulator::e4m3_of(x.x) | emulator::e4m3_of(x.y) << 8);
}
