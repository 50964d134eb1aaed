// Helpers of the CPU paths: dtype dispatch, and an exponential that compilers vectorise.
#pragma once
#include <bit>

#include "ops/pch.h"

namespace marrow {

// Calls function(T{}) with T = float or c10::BFloat16, an operator's two working dtypes.
template <typename Function>
decltype(auto) dispatch_working_dtype(at::ScalarType dtype, Function&& function) {
  if (dtype == at::kFloat) return function(float{});
  MARROW_CHECK(dtype == at::kBFloat16, ExitCode::kUsage, Fix("set train.dtype to fp32 or bf16"),
               "operators compute in float or bfloat16, not in {}", c10::toString(dtype));
  return function(c10::BFloat16{});
}

// e^x within 2 ulp, 0 below -87; branch-free so that `omp simd` loops over it become vector code.
inline float vector_exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5·2^23: adding it rounds to an integer
  const float clamped = std::min(88.3f, std::max(-87.0f, x));
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const float scale = std::bit_cast<float>((exponent + 127) << 23);
  return x < -87.0f ? 0.0f : p * scale;
}

inline float vector_sigmoid(float x) { return 1.0f / (1.0f + vector_exp(-x)); }

}  // namespace marrow
