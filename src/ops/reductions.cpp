#include "ops/reductions.h"

#include "ops/cpu_math.h"
#include "ops/cuda_launch.h"
#include "ops/reductions_cuda.h"

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

void add_sum_of_squares(const at::Tensor& flat, const at::Tensor& total) {
  MARROW_CHECK(flat.scalar_type() == at::kFloat && flat.is_contiguous() &&
                   total.scalar_type() == at::kDouble && total.numel() == 1 &&
                   total.device() == flat.device(),
               ExitCode::kUsage, Fix("pass a contiguous fp32 buffer and a [1] fp64 total"),
               "cannot add squares of {} {} to {} {}", c10::toString(flat.scalar_type()),
               c10::str(flat.sizes()), c10::toString(total.scalar_type()), c10::str(total.sizes()));
  const int64_t n = flat.numel();
  const auto* x = flat.const_data_ptr<float>();
  auto* sum = total.mutable_data_ptr<double>();
  if (flat.is_cuda()) {
    const at::Tensor partial = at::empty({kSumBlocks}, total.options());
    MARROW_CUDA_CALL(add_sum_of_squares_cuda(x, n, partial.mutable_data_ptr<double>(), sum,
                                             current_cuda_stream()));
    return;
  }
  constexpr int64_t kPart = 1 << 16;  // parts do not depend on the number of threads
  std::vector<double> parts((n + kPart - 1) / kPart);
  at::parallel_for(0, static_cast<int64_t>(parts.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      parts[i] = square_sum(x + i * kPart, std::min(kPart, n - i * kPart));
    }
  });
  for (const double part : parts) *sum += part;
}

}  // namespace marrow
