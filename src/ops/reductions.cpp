#include "ops/reductions.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

double square_sum(const float* x, int64_t n) {
  __m256d low = _mm256_setzero_pd(), high = low;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256d a = _mm256_cvtps_pd(_mm_loadu_ps(x + i));
    const __m256d b = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4));
    low = _mm256_fmadd_pd(a, a, low);
    high = _mm256_fmadd_pd(b, b, high);
  }
  alignas(32) std::array<double, 4> lanes;
  _mm256_store_pd(lanes.data(), _mm256_add_pd(low, high));
  double sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  for (; i < n; ++i) sum += double{x[i]} * x[i];
  return sum;
}

}  // namespace

void add_sum_of_squares(const Tensor& flat, const Tensor& total) {
  check_tensor("add_sum_of_squares: flat", flat, at::kFloat, flat.sizes());
  check_tensor("add_sum_of_squares: total", total, at::kDouble, {1}, flat.device());
  if (flat.is_cuda()) {
    const Tensor partial = at::empty({kSumBlocks}, total.options());
    MARROW_CUDA_CALL(add_sum_of_squares_cuda(flat, partial, total));
    return;
  }
  const int64_t n = flat.numel();
  constexpr int64_t kPart = 1 << 16;  // parts do not depend on the number of threads
  std::vector<double> parts((n + kPart - 1) / kPart);
  at::parallel_for(0, static_cast<int64_t>(parts.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      parts[i] = square_sum(floats(flat) + i * kPart, std::min(kPart, n - i * kPart));
    }
  });
  for (const double part : parts) *total.data_ptr<double>() += part;
}

}  // namespace marrow
