#include "ops/pch.h"
// After the precompiled header:
#include "ops/op_test_support.h"
#include "ops/rms_norm.h"

namespace marrow {
namespace {

constexpr double kEps = 1e-6;

at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& weight) {
  return x * (x.pow(2).mean(-1, true) + kEps).rsqrt() * weight;
}

struct Case {
  int64_t rows, hidden;
  at::ScalarType dtype;
  at::Device device;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t rows : {0, 1, 7, 601}) {
        for (const int64_t hidden : {1, 8, 17, 64, 131, 256, 2048, 2880}) {
          all.push_back({rows, hidden, dtype, device});
        }
      }
      for (const int64_t hidden : {1027, 9000}) all.push_back({37, hidden, dtype, device});  // long rows
      all.push_back({1100, 131, dtype, device});  // more rows than the backward has blocks, of several warps
    }
  }
  return all;
}

std::string name_of(const Case& c) {
  return fmt::format("[{}, {}] {} {}", c.rows, c.hidden, c10::toString(c.dtype), c.device.str());
}

TEST(RmsNorm, MatchesPlainComposition) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    const double tolerance = c.dtype == at::kFloat ? 2e-5 : 1e-2;
    const at::Tensor x = with_grad(random_tensor({c.rows, c.hidden}, c.dtype, c.device, 1));
    const Parameter weight = make_parameter(random_tensor({c.hidden}, c.dtype, c.device, 2));
    const at::Tensor dy = random_tensor({c.rows, c.hidden}, c.dtype, c.device, 3);
    const at::Tensor y = rms_norm(x, weight, kEps);
    EXPECT_EQ(y.scalar_type(), c.dtype);
    y.backward(dy);

    const at::Tensor reference_x = reference_leaf(x);
    const at::Tensor reference_weight = reference_leaf(weight.value);
    const at::Tensor reference_y = plain_norm(reference_x, reference_weight);
    reference_y.backward(dy.to(at::kCPU, at::kDouble));
    EXPECT_TRUE(tensors_close(y, reference_y, tolerance, tolerance));
    EXPECT_TRUE(tensors_close(x.grad(), reference_x.grad(), tolerance, 2 * tolerance));
    // Sums of `rows` terms in fp32; the terms come from exactly the same inputs.
    EXPECT_TRUE(tensors_close(weight.grad, reference_weight.grad(), 1e-5, 1e-6 * (c.rows + 1)));
  }
}

// Weights that say how far a factor is from 1: added in fp32, so that in bf16 too a small one counts.
TEST(RmsNorm, OffsetIsAddedToTheWeight) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    const double tolerance = c.dtype == at::kFloat ? 2e-5 : 1e-2;
    const at::Tensor x = with_grad(random_tensor({c.rows, c.hidden}, c.dtype, c.device, 1));
    const at::Tensor r = with_grad(at::zeros_like(x));
    const Parameter weight = make_parameter(random_tensor({c.hidden}, c.dtype, c.device, 2));
    const at::Tensor dy = random_tensor({c.rows, c.hidden}, c.dtype, c.device, 3);
    const at::Tensor y = rms_norm(x, weight, kEps, 1);
    y.backward(dy);
    EXPECT_TRUE(tensors_identical(add_rms_norm(x.detach(), r.detach(), weight, kEps, 1).second, y));

    const at::Tensor reference_x = reference_leaf(x);
    const at::Tensor reference_weight = reference_leaf(weight.value);
    const at::Tensor reference_y = plain_norm(reference_x, reference_weight + 1);
    reference_y.backward(dy.to(at::kCPU, at::kDouble));
    EXPECT_TRUE(tensors_close(y, reference_y, tolerance, tolerance));
    EXPECT_TRUE(tensors_close(x.grad(), reference_x.grad(), tolerance, 2 * tolerance));
    EXPECT_TRUE(tensors_close(weight.grad, reference_weight.grad(), 1e-5, 1e-6 * (c.rows + 1)));
  }
}

TEST(RmsNorm, AddMatchesPlainComposition) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    const double tolerance = c.dtype == at::kFloat ? 2e-5 : 1e-2;
    const at::Tensor x = with_grad(random_tensor({c.rows, c.hidden}, c.dtype, c.device, 1));
    const at::Tensor r = with_grad(random_tensor({c.rows, c.hidden}, c.dtype, c.device, 4));
    const Parameter weight = make_parameter(random_tensor({c.hidden}, c.dtype, c.device, 2));
    const at::Tensor d_sum = random_tensor({c.rows, c.hidden}, c.dtype, c.device, 5);
    const at::Tensor dy = random_tensor({c.rows, c.hidden}, c.dtype, c.device, 3);
    const auto [sum, normed] = add_rms_norm(x, r, weight, kEps);
    EXPECT_TRUE(tensors_identical(sum, x + r));
    ((sum.to(at::kDouble) * d_sum).sum() + (normed.to(at::kDouble) * dy).sum()).backward();

    const at::Tensor reference_sum = reference_leaf(sum);
    const at::Tensor reference_weight = reference_leaf(weight.value);
    const at::Tensor reference_y = plain_norm(reference_sum, reference_weight);
    ((reference_sum * d_sum.cpu()).sum() + (reference_y * dy.cpu()).sum()).backward();
    EXPECT_TRUE(tensors_close(normed, reference_y, tolerance, tolerance));
    EXPECT_TRUE(tensors_close(x.grad(), reference_sum.grad(), tolerance, 2 * tolerance));
    EXPECT_TRUE(tensors_identical(r.grad(), x.grad()));
    EXPECT_TRUE(tensors_close(weight.grad, reference_weight.grad(), 1e-5, 1e-6 * (c.rows + 1)));
  }
}

TEST(RmsNorm, OnlyOneOutputOfAddIsUsed) {
  for (const at::Device device : test_devices()) {
    const Parameter weight = make_parameter(random_tensor({24}, at::kFloat, device, 1));
    const at::Tensor x = with_grad(random_tensor({5, 24}, at::kFloat, device, 2));
    const at::Tensor r = random_tensor({5, 24}, at::kFloat, device, 3);
    const at::Tensor d = random_tensor({5, 24}, at::kFloat, device, 4);
    add_rms_norm(x, r, weight, kEps).first.backward(d);
    EXPECT_TRUE(tensors_identical(x.grad(), d));
    EXPECT_TRUE(tensors_identical(weight.grad, at::zeros({24}, device)));
    x.mutable_grad() = at::Tensor();
    add_rms_norm(x, r, weight, kEps).second.backward(d);
    const at::Tensor sum = with_grad(x + r);
    rms_norm(sum, {"w", weight.value, {}}, kEps).backward(d);
    EXPECT_TRUE(tensors_identical(x.grad(), sum.grad()));
  }
}

TEST(RmsNorm, WeightGradientAccumulatesAndRepeatsToTheBit) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor x = with_grad(random_tensor({3001, 72}, dtype, device, 1));
      const at::Tensor dy = random_tensor({3001, 72}, dtype, device, 2);
      const Parameter weight = make_parameter(random_tensor({72}, dtype, device, 3));
      rms_norm(x, weight, kEps).backward(dy);
      const at::Tensor once = weight.grad.clone();
      for (int repeat = 0; repeat < 5; ++repeat) {
        weight.grad.zero_();
        rms_norm(x, weight, kEps).backward(dy);
        EXPECT_TRUE(tensors_identical(weight.grad, once));
      }
      rms_norm(x, weight, kEps).backward(dy);
      EXPECT_TRUE(tensors_close(weight.grad, once * 2, 1e-6, 1e-6));
    }
  }
}

TEST(RmsNorm, WeightGradientDoesNotDependOnThreads) {
  const int before = at::get_num_threads();
  const at::Tensor x = with_grad(random_tensor({1999, 40}, at::kFloat, at::kCPU, 1));
  std::vector<at::Tensor> grads;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    const Parameter weight = make_parameter(at::ones({40}));
    rms_norm(x, weight, kEps).sum().backward();
    grads.push_back(weight.grad);
  }
  at::set_num_threads(before);
  EXPECT_TRUE(tensors_identical(grads[1], grads[0]));
  EXPECT_TRUE(tensors_identical(grads[2], grads[0]));
}

TEST(RmsNorm, StridedInputAndInference) {
  for (const at::Device device : test_devices()) {
    const at::Tensor wide = random_tensor({9, 48}, at::kFloat, device, 1);
    const Parameter weight{"w", random_tensor({24}, at::kFloat, device, 2), {}};
    const at::Tensor part = wide.narrow(1, 24, 24);
    const at::Tensor y = rms_norm(part, weight, kEps);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(tensors_identical(y, rms_norm(part.contiguous(), weight, kEps)));
    const at::Tensor x = with_grad(part);
    rms_norm(x, weight, kEps).t().contiguous().t().sum().backward();  // strided gradient
    EXPECT_TRUE(x.grad().defined());
    const at::NoGradGuard guard;
    EXPECT_FALSE(rms_norm(x, weight, kEps).requires_grad());
  }
}

TEST(RmsNorm, MismatchNamesBothShapes) {
  const Parameter weight = make_parameter(at::ones({8}), "layers.0.input_norm");
  try {
    rms_norm(at::ones({2, 9}), weight, kEps);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(error.to_text().find("[2, 9]"), std::string::npos) << error.to_text();
    EXPECT_NE(error.to_text().find("layers.0.input_norm"), std::string::npos);
  }
}

TEST(CheckTensor, AnErrorCarriesTheTensor) {
  try {
    rms_norm(at::zeros({2, 3}, at::kDouble), make_parameter(at::ones({3})), 1e-6);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    ASSERT_EQ(error.report().tensors.size(), 1U);
    EXPECT_NE(error.report().tensors[0].find("Double [2, 3] on cpu"), std::string::npos) << error.report().tensors[0];
    EXPECT_NE(error.to_text().find("  tensor: rms_norm: x"), std::string::npos) << error.to_text();
  }
}

}  // namespace
}  // namespace marrow
