#include "ops/gated_rms_norm.h"

#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

TEST(GatedRmsNorm, MatchesPlainComposition) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t tokens : {0, 1, 7, 601}) {
        for (const int64_t size : {1, 8, 17, 64, 128, 131, 256}) {
          SCOPED_TRACE(fmt::format("{} tokens of {}, {} {}", tokens, size, c10::toString(dtype), device.str()));
          const std::array<int64_t, 3> sizes = {tokens, 3, size};
          const Tensor x = with_grad(random_tensor(sizes, dtype, device, 1));
          const Tensor gate = with_grad(random_tensor(sizes, dtype, device, 2));
          const Parameter weight = make_parameter(random_tensor({size}, dtype, device, 3));
          const Tensor dy = random_tensor(sizes, dtype, device, 4);
          const Tensor y = gated_rms_norm(x, gate, weight, 1e-6);
          EXPECT_EQ(y.scalar_type(), dtype);
          y.backward(dy);

          const Tensor rx = reference_leaf(x), rg = reference_leaf(gate), rw = reference_leaf(weight.value);
          const Tensor expected = rx * (rx.square().mean(-1, true) + 1e-6).rsqrt() * rw * at::silu(rg);
          expected.backward(dy.to(at::kCPU, at::kDouble));
          const double tolerance = dtype == at::kFloat ? 2e-5 : 1e-2;
          EXPECT_TRUE(tensors_close(y, expected, tolerance, tolerance));
          EXPECT_TRUE(tensors_close(x.grad(), rx.grad(), tolerance, 2 * tolerance));
          EXPECT_TRUE(tensors_close(gate.grad(), rg.grad(), tolerance, tolerance));
          EXPECT_TRUE(tensors_close(weight.grad, rw.grad(), 1e-5, 1e-6 * static_cast<double>(3 * tokens + 1)));
        }
      }
    }
  }
}

TEST(GatedRmsNorm, WeightGradientAccumulatesAndRepeatsToTheBit) {
  for (const at::Device device : test_devices()) {
    const Tensor x = with_grad(random_tensor({1001, 3, 64}, at::kBFloat16, device, 1));
    const Tensor gate = random_tensor({1001, 3, 64}, at::kBFloat16, device, 2);
    const Parameter weight = make_parameter(random_tensor({64}, at::kBFloat16, device, 3));
    gated_rms_norm(x, gate, weight, 1e-6).sum().backward();
    const Tensor once = weight.grad.clone();
    for (int repeat = 0; repeat < 3; ++repeat) {
      weight.grad.zero_();
      gated_rms_norm(x, gate, weight, 1e-6).sum().backward();
      EXPECT_TRUE(tensors_identical(weight.grad, once));
    }
    gated_rms_norm(x, gate, weight, 1e-6).sum().backward();
    EXPECT_TRUE(tensors_close(weight.grad, once * 2, 1e-6, 1e-6));
  }
}

TEST(GatedRmsNorm, WeightGradientDoesNotDependOnThreads) {
  const int before = at::get_num_threads();
  const Tensor x = with_grad(random_tensor({1999, 3, 40}, at::kFloat, at::kCPU, 1));
  const Tensor gate = random_tensor({1999, 3, 40}, at::kFloat, at::kCPU, 2);
  std::vector<Tensor> grads;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    const Parameter weight = make_parameter(at::ones({40}));
    gated_rms_norm(x, gate, weight, 1e-6).sum().backward();
    grads.push_back(weight.grad);
  }
  at::set_num_threads(before);
  EXPECT_TRUE(tensors_identical(grads[1], grads[0]));
  EXPECT_TRUE(tensors_identical(grads[2], grads[0]));
}

TEST(GatedRmsNorm, RefusesWhatDoesNotFit) {
  const Tensor x = at::ones({4, 2, 8});
  const Parameter weight = make_parameter(at::ones({8}));
  EXPECT_THROW(gated_rms_norm(x, at::ones({4, 2, 7}), weight, 1e-6), Error);
  EXPECT_THROW(gated_rms_norm(x, x, make_parameter(at::ones({7})), 1e-6), Error);
  EXPECT_THROW(gated_rms_norm(x, x.to(at::kBFloat16), weight, 1e-6), Error);
  EXPECT_NO_THROW(gated_rms_norm(x, x, weight, 1e-6));
}

}  // namespace
}  // namespace marrow
