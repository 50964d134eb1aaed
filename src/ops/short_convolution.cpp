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

// index [T, K]: the rows that each token sees, of x or, behind those, of the halos; −1: zeros.
std::vector<int64_t> rows_seen(const Inputs& in) {
  const int32_t* starts = ints(in.starts);
  const int64_t halo = in.taps() - 1;
  std::vector<int64_t> index;
  for (int64_t s = 0; s < in.segments(); ++s) {
    for (int64_t t = starts[s]; t < starts[s + 1]; ++t) {
      for (int64_t row = t - halo; row <= t; ++row) {
        const int64_t before = starts[s] - row;
        index.push_back(before <= 0 ? row : in.halo.defined() ? in.tokens() + (s + 1) * halo - before : -1);
      }
    }
  }
  return index;
}

// Row r of the result = Σ_j weight[:, j] · rows[index[r, j]], all fp32.
Tensor combine(const Tensor& rows, const std::vector<int64_t>& index, const Tensor& weight) {
  const int64_t taps = weight.size(1), channels = weight.size(0);
  const Tensor by_tap = weight.t().contiguous();
  const Tensor out = at::zeros({static_cast<int64_t>(index.size()) / taps, channels}, rows.options());
  at::parallel_for(0, out.size(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * taps; i < end * taps; ++i) {
      if (index[i] < 0) continue;
      const float *row = floats(rows) + index[i] * channels, *factor = floats(by_tap) + i % taps * channels;
      float* sums = floats(out) + i / taps * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) sums[c] += factor[c] * row[c];
    }
  });
  return out;
}

// Those of x and the halos, as fp32.
Tensor all_rows(const Inputs& in) {
  return (in.halo.defined() ? at::cat({in.x, in.halo.flatten(0, 1)}) : in.x).to(at::kFloat);
}

ShortConvolutionArgs cuda_args(const Inputs& in) {
  const auto data = [](const Tensor& x) -> const void* { return x.defined() ? x.data_ptr() : nullptr; };
  const int64_t part = std::max<int64_t>(16, (in.tokens() + kConvolutionParts - 1) / kConvolutionParts);
  const int64_t parts = (in.tokens() + part - 1) / part;
  return {data(in.x),    data(in.weight), data(in.halo), ints(in.starts), in.tokens(),
          in.channels(), in.taps(),       in.segments(), parts,           part};
}

Tensor forward(const Inputs& in) {
  if (in.x.is_cuda()) {
    const Tensor out = at::empty_like(in.x);
    if (in.x.numel() > 0) MARROW_CUDA_CALL(short_convolution_forward_cuda(cuda_args(in), out));
    return out;
  }
  return at::silu(combine(all_rows(in), rows_seen(in), in.weight.to(at::kFloat))).to(in.x.scalar_type());
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
  const int64_t taps = in.taps(), channels = in.channels();
  const Tensor rows = all_rows(in), weight = in.weight.to(at::kFloat);
  const std::vector<int64_t> seen = rows_seen(in);
  const Tensor d_sums = at::silu_backward(d_out.to(at::kFloat), combine(rows, seen, weight));
  std::vector<int64_t> seen_by(rows.size(0) * taps, -1);
  for (size_t i = 0; i < seen.size(); ++i) {
    if (seen[i] >= 0) seen_by[seen[i] * taps + i % taps] = i / taps;
  }
  const Tensor d_rows = combine(d_sums, seen_by, weight).to(in.x.scalar_type());
  const auto d_weight = sum_over_rows(in.tokens(), taps * channels, [&](int64_t t, float* sums) {
    const float* d = floats(d_sums) + t * channels;
    for (int64_t j = 0; j < taps; ++j, sums += channels) {
      if (seen[t * taps + j] < 0) continue;
      const float* row = floats(rows) + seen[t * taps + j] * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) sums[c] += d[c] * row[c];
    }
  });
  for (int64_t i = 0; weight_grad.defined() && i < weight_grad.numel(); ++i) {
    floats(weight_grad)[i] += d_weight[i % taps * channels + i / taps];
  }
  if (!in.halo.defined()) return {d_rows, {}};
  return {d_rows.narrow(0, 0, in.tokens()), d_rows.narrow(0, in.tokens(), rows.size(0) - in.tokens()).view_as(in.halo)};
}

}  // namespace

Tensor short_convolution(const Tensor& x, const Parameter& weight, const Tensor& starts, const Tensor& halo) {
  const auto dense = [](const Tensor& t) { return t.defined() ? t.detach().contiguous() : t; };
  const Inputs in{dense(x), weight.value.flatten(0, -2), dense(starts), dense(halo)};
  check_tensor("short_convolution: x", in.x, kWorkingDtype, {-1, -1});
  check_tensor(weight.name, in.weight, x.scalar_type(), {in.channels(), -1}, x.device());
  check_segments("short_convolution: starts", in.starts, in.tokens(), x.device());
  MARROW_CHECK(in.taps() >= 1 && in.taps() <= kMaxTaps, ExitCode::kUsage,
               Fix("set linear_conv_kernel_dim in config.json to at most 4"), "{} has filters of {} tokens, at most {}",
               weight.name, in.taps(), kMaxTaps);
  if (in.halo.defined()) {
    check_tensor("short_convolution: halo", in.halo, x.scalar_type(), {in.segments(), in.taps() - 1, in.channels()},
                 x.device());
  }
  return differentiable({x, halo}, {forward(in)}, [in, grad = weight.grad](const variable_list& d_out) {
    return backward(in, d_out[0].contiguous(), grad);
  })[0];
}

}  // namespace marrow
