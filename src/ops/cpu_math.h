// What the CPU paths of operators share: a matrix product without tensor overhead, and exp.
#pragma once
#include <immintrin.h>

#include "ops/pch.h"

// The BLAS inside libtorch (MKL), column-major. One thread inside at::parallel_for, all outside.
extern "C" void sgemm_(const char* trans_a, const char* trans_b, const int* m, const int* n, const int* k,
                       const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                       const float* beta, float* c, const int* ldc);

namespace marrow {

// Row-major c [m, n] = op(a) [m, k] · op(b) [k, n] + beta · c; op(a) = aᵀ where transpose_a. ld is
// the distance of rows as stored. beta = 0 does not read c. Sizes of a call stay below 2^31.
inline void sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
                  const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (beta == 0.0f) {
      for (int64_t i = 0; i < m; ++i) std::fill_n(c + i * ldc, n, 0.0f);
    }
    return;
  }
  const int sizes[] = {int(n), int(m), int(k), int(ldb), int(lda), int(ldc)};
  const float one = 1.0f;
  sgemm_(transpose_b ? "T" : "N", transpose_a ? "T" : "N", &sizes[0], &sizes[1], &sizes[2], &one, b, &sizes[3], a,
         &sizes[4], &beta, c, &sizes[5]);
}

// exp of 8 floats, 1e-7 relative; below -87 it is 0, above 88 it saturates. NaN stays NaN.
inline __m256 exp8(__m256 x) {
  const __m256 limited = _mm256_max_ps(_mm256_set1_ps(-87.5f), _mm256_min_ps(_mm256_set1_ps(88.0f), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(limited, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), limited);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);  // Cephes' expf
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const __m256 result = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ), result);
}

inline __m256 sigmoid8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return _mm256_div_ps(one, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

// The first n (at most 8) of 8 consecutive elements, the rest zero.
inline __m256 load8(const float* from, int64_t n) {
  if (n >= 8) return _mm256_loadu_ps(from);
  float pack[8] = {};
  std::copy_n(from, n, pack);
  return _mm256_loadu_ps(pack);
}

// Stores the first n (at most 8) elements.
inline void store8(float* to, __m256 values, int64_t n) {
  if (n >= 8) return _mm256_storeu_ps(to, values);
  float pack[8];
  _mm256_storeu_ps(pack, values);
  std::copy_n(pack, n, to);
}

// 1 / sqrt(mean(x²) + eps).
inline float inverse_rms(const float* x, int64_t size, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < size; ++c) squares += x[c] * x[c];
  return 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
}

// RMSNorm of a row, and its gradient: dx and d_weight +=.
inline void norm_row(const float* x, const float* weight, float* out, int64_t size, float eps) {
  const float scale = inverse_rms(x, size, eps);
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) out[c] = x[c] * scale * weight[c];
}

inline void norm_row_backward(const float* x, const float* dy, const float* weight, float* dx, float* d_weight,
                              int64_t size, float eps) {
  const float scale = inverse_rms(x, size, eps);
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t c = 0; c < size; ++c) {
    dot += dy[c] * weight[c] * x[c];
    d_weight[c] += dy[c] * x[c] * scale;
  }
  const float shift = dot * scale * scale / static_cast<float>(size);
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) dx[c] += scale * (dy[c] * weight[c] - x[c] * shift);
}

// Calls work(row, sums [width]) for all rows; → Σ of the sums, in an order that does not depend on the threads.
template <typename Work>
std::vector<float> sum_over_rows(int64_t rows, int64_t width, const Work& work) {
  constexpr int64_t kRows = 256;  // of a partial sum
  const int64_t chunks = (rows + kRows - 1) / kRows;
  std::vector<float> partials(chunks * width, 0.0f), total(width, 0.0f);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kRows; row < std::min(rows, end * kRows); ++row) {
      work(row, partials.data() + row / kRows * width);
    }
  });
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int64_t c = 0; c < width; ++c) total[c] += partials[chunk * width + c];
  }
  return total;
}

// target, if defined, += its share of what sum_over_rows gave.
inline void add_sums(const float* sums, const at::Tensor& target) {
  if (!target.defined()) return;
  float* to = target.data_ptr<float>();
  for (int64_t c = 0; c < target.numel(); ++c) to[c] += sums[c];
}

inline float sum8(__m256 x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float max8(__m256 x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// values = exp(values − shift); returns their sum.
inline float exp_row(float* values, int64_t size, float shift) {
  __m256 sums = _mm256_setzero_ps();
  int64_t c = 0;
  for (; c + 8 <= size; c += 8) {
    const __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(values + c), _mm256_set1_ps(shift)));
    _mm256_storeu_ps(values + c, e);
    sums = _mm256_add_ps(sums, e);
  }
  float sum = sum8(sums);
  if (c == size) return sum;
  store8(values + c, exp8(_mm256_sub_ps(load8(values + c, size - c), _mm256_set1_ps(shift))), size - c);
  for (; c < size; ++c) sum += values[c];
  return sum;
}

inline float max_of_row(const float* values, int64_t size) {
  __m256 most = _mm256_set1_ps(-INFINITY);
  int64_t c = 0;
  for (; c + 8 <= size; c += 8) most = _mm256_max_ps(most, _mm256_loadu_ps(values + c));
  float result = max8(most);
  for (; c < size; ++c) result = std::max(result, values[c]);
  return result;
}

}  // namespace marrow
