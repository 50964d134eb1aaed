#include "ops/short_convolution.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

constexpr int64_t kMaxTaps = 4;

struct Inputs {
  Tensor x, weight, starts, halo;  // weight [C, K]

  int64_t tokens() const { return x.size(0); }
  int64_t channels() const { return x.size(1); }
  int64_t taps() const { return weight.size(1); }
  int64_t segments() const { return starts.size(0) - 1; }
};

// Calls body(t, its segment) for all tokens, on all threads.
template <typename Body>
void for_tokens(const Inputs& in, const Body& body) {
  const int32_t* starts = ints(in.starts);
  at::parallel_for(0, in.tokens(), 64, [&](int64_t begin, int64_t end) {
    int64_t segment = std::upper_bound(starts, starts + in.segments(), begin) - starts - 1;
    for (int64_t t = begin; t < end; ++t) {
      while (starts[segment + 1] <= t) ++segment;
      body(t, segment);
    }
  });
}

// Row t + j − K + 1 of a segment as token t sees it, j < K: of x, of the halo, or null.
const float* row_of(const Inputs& in, int64_t t, int64_t segment, int64_t j) {
  const int64_t row = t + j - in.taps() + 1, before = ints(in.starts)[segment] - row;
  if (before <= 0) return floats(in.x) + row * in.channels();
  if (!in.halo.defined()) return nullptr;
  return floats(in.halo) + ((segment + 1) * (in.taps() - 1) - before) * in.channels();
}

// sums += the products of token t before silu. weight is [K, C].
void convolve(const Inputs& in, const float* weight, int64_t t, int64_t segment, float* sums) {
  for (int64_t j = 0; j < in.taps(); ++j) {
    const float* row = row_of(in, t, segment, j);
    if (row == nullptr) continue;
#pragma omp simd
    for (int64_t c = 0; c < in.channels(); ++c) sums[c] += weight[j * in.channels() + c] * row[c];
  }
}

// All fp32; `out` is zero.
void forward_cpu(const Inputs& in, const Tensor& out) {
  const Tensor weight = in.weight.t().contiguous();
  for_tokens(in, [&](int64_t t, int64_t segment) {
    float* to = floats(out) + t * in.channels();
    convolve(in, floats(weight), t, segment, to);
    for (int64_t c = 0; c < in.channels(); c += 8) {
      const __m256 z = load8(to + c, in.channels() - c);
      store8(to + c, _mm256_mul_ps(z, sigmoid8(z)), in.channels() - c);
    }
  });
}

// All fp32; dx and d_halo are zero. → the weight's gradient [K, C].
std::vector<float> backward_cpu(const Inputs& in, const Tensor& d_out, const Tensor& dx, const Tensor& d_halo) {
  const Tensor weight = in.weight.t().contiguous(), d_sums = at::zeros_like(in.x);
  const int64_t channels = in.channels(), taps = in.taps();
  const int32_t* starts = ints(in.starts);
  for_tokens(in, [&](int64_t t, int64_t segment) {
    float* to = floats(d_sums) + t * channels;
    convolve(in, floats(weight), t, segment, to);
    for (int64_t c = 0; c < channels; c += 8) {
      const __m256 z = load8(to + c, channels - c), s = sigmoid8(z);
      const __m256 slope = _mm256_fmadd_ps(_mm256_mul_ps(z, s), _mm256_sub_ps(_mm256_set1_ps(1.0f), s), s);
      store8(to + c, _mm256_mul_ps(load8(floats(d_out) + t * channels + c, channels - c), slope), channels - c);
    }
  });
  // The gradient of row `row`, which may be before the segment's first.
  const auto add_row = [&](int64_t row, int64_t segment, float* to) {
    for (int64_t j = 0; j < taps; ++j) {
      const int64_t t = row + taps - 1 - j;
      if (t < starts[segment] || t >= starts[segment + 1]) continue;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        to[c] += floats(weight)[j * channels + c] * floats(d_sums)[t * channels + c];
      }
    }
  };
  for_tokens(in, [&](int64_t t, int64_t segment) { add_row(t, segment, floats(dx) + t * channels); });
  for (int64_t i = 0; d_halo.defined() && i < in.segments() * (taps - 1); ++i) {
    const int64_t segment = i / (taps - 1);
    add_row(starts[segment] - (taps - 1) + i % (taps - 1), segment, floats(d_halo) + i * channels);
  }
  return sum_over_rows(in.tokens(), taps * channels, [&](int64_t t, float* sums) {
    const int64_t segment = std::upper_bound(starts, starts + in.segments(), t) - starts - 1;
    for (int64_t j = 0; j < taps; ++j) {
      const float* row = row_of(in, t, segment, j);
      if (row == nullptr) continue;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) sums[j * channels + c] += floats(d_sums)[t * channels + c] * row[c];
    }
  });
}

Inputs as_fp32(const Inputs& in) {
  return {in.x.to(at::kFloat), in.weight.to(at::kFloat), in.starts,
          in.halo.defined() ? in.halo.to(at::kFloat) : in.halo};
}

ShortConvolutionArgs cuda_args(const Inputs& in) {
  const auto data = [](const Tensor& x) -> const void* { return x.defined() ? x.data_ptr() : nullptr; };
  const int64_t part = std::max<int64_t>(16, (in.tokens() + kConvolutionParts - 1) / kConvolutionParts);
  return {data(in.x),
          data(in.weight),
          data(in.halo),
          ints(in.starts),
          in.tokens(),
          in.channels(),
          in.taps(),
          in.segments(),
          (in.tokens() + part - 1) / part,
          part};
}

Tensor forward(const Inputs& in) {
  if (in.x.is_cuda()) {
    const Tensor out = at::empty_like(in.x);
    if (in.x.numel() > 0) MARROW_CUDA_CALL(short_convolution_forward_cuda(cuda_args(in), out));
    return out;
  }
  const Tensor out32 = at::zeros(in.x.sizes(), in.x.options().dtype(at::kFloat));
  forward_cpu(as_fp32(in), out32);
  return out32.to(in.x.scalar_type());
}

// → dx and d_halo; adds the weight's.
variable_list backward(const Inputs& in, const Tensor& d_out, const Tensor& weight_grad) {
  if (in.x.is_cuda()) {
    const Tensor dx = at::empty_like(in.x), d_halo = in.halo.defined() ? at::zeros_like(in.halo) : Tensor();
    if (in.x.numel() == 0) return {dx, d_halo};
    const ShortConvolutionArgs args = cuda_args(in);
    const Tensor partials = at::empty({args.parts, in.weight.numel()}, in.x.options().dtype(at::kFloat));
    MARROW_CUDA_CALL(short_convolution_backward_cuda(args, d_out, dx, d_halo, partials, weight_grad));
    return {dx, d_halo};
  }
  const Inputs in32 = as_fp32(in);
  const Tensor dx = at::zeros_like(in32.x), d_halo = in.halo.defined() ? at::zeros_like(in32.halo) : Tensor();
  const std::vector<float> d_weight = backward_cpu(in32, d_out.to(at::kFloat), dx, d_halo);
  for (int64_t i = 0; weight_grad.defined() && i < weight_grad.numel(); ++i) {
    floats(weight_grad)[i] += d_weight[i % in.taps() * in.channels() + i / in.taps()];
  }
  const at::ScalarType dtype = in.x.scalar_type();
  return {dx.to(dtype), d_halo.defined() ? d_halo.to(dtype) : d_halo};
}

}  // namespace

Tensor short_convolution(const Tensor& x, const Parameter& weight, const Tensor& starts, const Tensor& halo) {
  const auto dense = [](const Tensor& t) { return t.defined() ? t.detach().contiguous() : t; };
  const Inputs in{dense(x), weight.value.flatten(0, -2), dense(starts), dense(halo)};
  check_tensor("short_convolution: x", in.x, kWorkingDtype, {-1, -1});
  check_tensor(weight.name, in.weight, x.scalar_type(), {in.channels(), -1}, x.device());
  check_tensor("short_convolution: starts", in.starts, at::kInt, {-1}, x.device());
  MARROW_CHECK(in.taps() >= 1 && in.taps() <= kMaxTaps, ExitCode::kUsage,
               Fix("set linear_conv_kernel_dim in config.json to at most 4"), "{} has filters of {} tokens, at most {}",
               weight.name, in.taps(), kMaxTaps);
  if (in.halo.defined()) {
    check_tensor("short_convolution: halo", in.halo, x.scalar_type(), {in.segments(), in.taps() - 1, in.channels()},
                 x.device());
  }
  if (in.starts.is_cpu()) {
    const int32_t *from = ints(in.starts), *to = from + in.starts.numel();
    MARROW_CHECK(from != to && *from == 0 && to[-1] == in.tokens() && std::is_sorted(from, to), ExitCode::kUsage,
                 Fix("pass offsets that ascend from 0 to the number of tokens"),
                 "short_convolution: segments start at {}, {} tokens", c10::str(in.starts), in.tokens());
  }
  return differentiable({x, halo}, {forward(in)}, [in, grad = weight.grad](const variable_list& d_out) {
    return backward(in, d_out[0].contiguous(), grad);
  })[0];
}

}  // namespace marrow
