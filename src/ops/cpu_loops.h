// Helpers of the CPU paths: dtype dispatch, and packs of 8 elements of either dtype.
#pragma once
#include "ops/cpu_math.h"
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

// 1 / sqrt(mean(x²) + eps).
template <typename T>
float inverse_rms(const T* x, int64_t size, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < size; ++c) {
    const float value = static_cast<float>(x[c]);
    squares += value * value;
  }
  return 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
}

// The first n (at most 8) of 8 consecutive elements as fp32, the rest zero.
inline __m256 load8(const float* from, int64_t n) {
  if (n >= 8) return _mm256_loadu_ps(from);
  float pack[8] = {};
  std::copy_n(from, n, pack);
  return _mm256_loadu_ps(pack);
}

inline __m256 load8(const c10::BFloat16* from, int64_t n) {
  float pack[8] = {};
  for (int64_t i = 0; i < std::min<int64_t>(n, 8); ++i) pack[i] = static_cast<float>(from[i]);
  return _mm256_loadu_ps(pack);
}

// Stores the first n (at most 8) elements.
template <typename T>
void store8(T* to, __m256 values, int64_t n) {
  if constexpr (std::is_same_v<T, float>) {
    if (n >= 8) return _mm256_storeu_ps(to, values);
  }
  float pack[8];
  _mm256_storeu_ps(pack, values);
  for (int64_t i = 0; i < std::min<int64_t>(n, 8); ++i) to[i] = static_cast<T>(pack[i]);
}

inline __m256 sigmoid8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return _mm256_div_ps(one, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

}  // namespace marrow
