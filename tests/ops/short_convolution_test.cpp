#include "ops/short_convolution.h"

#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

struct Case {
  std::vector<int32_t> starts;
  int64_t channels, taps;
  bool halo;
};

Tensor plain(const Tensor& x, const Tensor& weight, const std::vector<int32_t>& starts, const Tensor& halo) {
  const int64_t channels = x.size(1), taps = weight.size(1);
  std::vector<Tensor> parts{x.narrow(0, 0, 0)};
  for (size_t s = 0; s + 1 < starts.size(); ++s) {
    const int64_t tokens = starts[s + 1] - starts[s];
    const Tensor before = halo.defined() ? halo[static_cast<int64_t>(s)] : at::zeros({taps - 1, channels}, x.options());
    const Tensor rows = at::cat({before, x.narrow(0, starts[s], tokens)});
    Tensor sum = at::zeros({tokens, channels}, x.options());
    for (int64_t j = 0; j < taps; ++j) sum = sum + rows.narrow(0, j, tokens) * weight.select(1, j);
    parts.push_back(at::silu(sum));
  }
  return at::cat(parts);
}

TEST(ShortConvolution, MatchesPlainComposition) {
  const Case cases[] = {
      {{0, 0}, 8, 4, true},
      {{0, 1}, 3, 4, false},
      {{0, 2, 2, 5, 6}, 16, 4, true},
      {{0, 70}, 8, 1, false},
      {{0, 17, 83}, 24, 2, true},
      {{0, 300, 601}, 40, 4, true},
      {{0, 333, 334, 335, 336, 337, 700}, 72, 3, true},
      {{0, 129}, 131, 4, true},
  };
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [starts, channels, taps, has_halo] : cases) {
        const int64_t tokens = starts.back(), segments = static_cast<int64_t>(starts.size()) - 1;
        SCOPED_TRACE(fmt::format("{} segments, {} tokens, {} channels, {} taps, {} {}", segments, tokens, channels,
                                 taps, c10::toString(dtype), device.str()));
        const Tensor x = with_grad(random_tensor({tokens, channels}, dtype, device, 1));
        const Parameter weight = make_parameter(random_tensor({channels, taps}, dtype, device, 2));
        const Tensor halo =
            has_halo ? with_grad(random_tensor({segments, taps - 1, channels}, dtype, device, 3)) : Tensor();
        const Tensor dy = random_tensor({tokens, channels}, dtype, device, 4);
        const Tensor y = short_convolution(x, weight, at::tensor(starts, at::kInt).to(device), halo);
        EXPECT_EQ(y.scalar_type(), dtype);
        y.backward(dy);

        const Tensor rx = reference_leaf(x), rw = reference_leaf(weight.value);
        const Tensor rh = has_halo ? reference_leaf(halo) : Tensor();
        const Tensor expected = plain(rx, rw, starts, rh);
        expected.backward(dy.to(at::kCPU, at::kDouble));
        const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-2;
        EXPECT_TRUE(tensors_close(y, expected, tolerance, tolerance));
        EXPECT_TRUE(tensors_close(x.grad(), rx.grad(), tolerance, tolerance));
        if (tokens == 0) continue;
        EXPECT_TRUE(tensors_close(weight.grad, rw.grad(), 1e-5, 1e-6 * static_cast<double>(tokens + 10)));
        if (!has_halo) continue;
        EXPECT_TRUE(tensors_close(halo.grad(), rh.grad(), tolerance, tolerance));
      }
    }
  }
}

TEST(ShortConvolution, HaloIsTheRowsBefore) {
  for (const at::Device device : test_devices()) {
    const Tensor x = random_tensor({90, 16}, at::kBFloat16, device, 1);
    const Parameter weight = make_parameter(random_tensor({16, 1, 4}, at::kBFloat16, device, 2));  // as the Hub has it
    const auto starts = [&](int32_t end) { return at::tensor({0, end}, at::kInt).to(device); };
    const Tensor whole = short_convolution(x, weight, starts(90));
    const Tensor first = short_convolution(x.narrow(0, 0, 41), weight, starts(41));
    const Tensor second = short_convolution(x.narrow(0, 41, 49), weight, starts(49), x.narrow(0, 38, 3).unsqueeze(0));
    EXPECT_TRUE(tensors_identical(at::cat({first, second}), whole));
  }
}

TEST(ShortConvolution, WeightGradientAccumulatesAndRepeatsToTheBit) {
  for (const at::Device device : test_devices()) {
    const Tensor x = with_grad(random_tensor({2001, 24}, at::kFloat, device, 1));
    const Tensor starts = at::tensor({0, 700, 2001}, at::kInt).to(device);
    const Parameter weight = make_parameter(random_tensor({24, 4}, at::kFloat, device, 2));
    short_convolution(x, weight, starts).sum().backward();
    const Tensor once = weight.grad.clone();
    for (int repeat = 0; repeat < 3; ++repeat) {
      weight.grad.zero_();
      short_convolution(x, weight, starts).sum().backward();
      EXPECT_TRUE(tensors_identical(weight.grad, once));
    }
    short_convolution(x, weight, starts).sum().backward();
    EXPECT_TRUE(tensors_close(weight.grad, once * 2, 1e-6, 1e-6));
  }
}

TEST(ShortConvolution, RefusesWhatDoesNotFit) {
  const Tensor x = at::ones({4, 8}), starts = at::tensor({0, 4}, at::kInt);
  const Parameter weight = make_parameter(at::ones({8, 4}));
  EXPECT_THROW(short_convolution(x, make_parameter(at::ones({8, 5})), starts), Error);
  EXPECT_THROW(short_convolution(x, make_parameter(at::ones({7, 4})), starts), Error);
  EXPECT_THROW(short_convolution(x, weight, at::tensor({0, 3}, at::kInt)), Error);
  EXPECT_THROW(short_convolution(x, weight, starts, at::ones({1, 4, 8})), Error);
  EXPECT_NO_THROW(short_convolution(x, weight, starts, at::ones({1, 3, 8})));
}

}  // namespace
}  // namespace marrow
