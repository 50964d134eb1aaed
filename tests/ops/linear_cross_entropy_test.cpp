#include "ops/linear_cross_entropy.h"

#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

// Random targets in [0, V), every third one -1.
Tensor random_targets(int64_t tokens, int64_t vocabulary) {
  const Tensor noise = random_tensor({tokens}, at::kFloat, at::kCPU, 77);
  Tensor targets = ((noise.abs() * 1e5).to(at::kLong) % vocabulary).to(at::kInt);
  targets.slice(0, 2, tokens, 3).fill_(-1);
  return targets;
}

TEST(LinearCrossEntropy, MatchesPlainComposition) {
  struct Shape {
    int64_t tokens, hidden, vocabulary;
  };
  const std::vector<Shape> shapes = {
      {0, 8, 16},     {1, 1, 1},    {1, 8, 257},     {7, 13, 17},
      {300, 24, 512}, {2, 8, 1003}, {210, 8, 40000}, {tests_run_on_cpu ? 5000 : 700, 8, 24}};
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const Shape& s : shapes) {
        SCOPED_TRACE(
            fmt::format("{} {} T={} H={} V={}", device.str(), c10::toString(dtype), s.tokens, s.hidden, s.vocabulary));
        const Tensor x = random_tensor({s.tokens, s.hidden}, dtype, device, 1);
        const Tensor w = random_tensor({s.vocabulary, s.hidden}, dtype, device, 2);
        const Tensor targets = random_targets(s.tokens, s.vocabulary);
        const Tensor initial = random_tensor(w.sizes(), at::kFloat, device, 3);
        const Parameter weight{"head", w, initial.clone()};
        const double scale = 0.25;
        const auto got = linear_cross_entropy(x, weight, targets.to(device), scale, true);
        const auto loss_only = linear_cross_entropy(x, {"head", w, {}}, targets.to(device), scale, false);

        const Tensor xr = reference_leaf(x), wr = reference_leaf(w);
        const Tensor log_p = at::mm(xr, wr.t()).log_softmax(1);
        const Tensor chosen = log_p.gather(1, targets.to(at::kLong).clamp_min(0).unsqueeze(1));
        const Tensor loss = -(chosen.squeeze(1) * (targets >= 0)).sum();
        (loss * scale).backward();
        // bf16 logits on the GPU are rounded: 2^-9 of values up to about 12.
        const bool rounded = dtype == at::kBFloat16 && device.is_cuda();
        const double count = std::max<double>(1, static_cast<double>(s.tokens));
        const double tolerance = rounded ? 1e-2 : 1e-5;
        EXPECT_TRUE(tensors_close(got.loss_sum, loss.detach().view({1}), tolerance, rounded ? 0.02 * count : 1e-5));
        EXPECT_TRUE(tensors_identical(loss_only.loss_sum, got.loss_sum));
        EXPECT_FALSE(loss_only.d_x.defined());
        EXPECT_EQ(got.d_x.scalar_type(), dtype);
        // A plain fp32 product over V terms is off by 5e-5 at V = 40,000, at worst.
        const double dx_error = 1e-6 + 2e-9 * static_cast<double>(s.vocabulary);
        EXPECT_TRUE(tensors_close(got.d_x, xr.grad(), dtype == at::kFloat ? 1e-4 : 1e-2,
                                  dtype == at::kFloat ? dx_error : 2e-2));
        EXPECT_TRUE(
            tensors_close(weight.grad, wr.grad() + initial.cpu(), rounded ? 1e-2 : 1e-4, rounded ? 3e-2 : 1e-4));
        const Tensor masked = got.d_x.slice(0, 2, s.tokens, 3);
        EXPECT_EQ(masked.count_nonzero().item<int64_t>(), 0);
      }
    }
  }
}

// A part fits into one chunk of logits, all do not.
TEST(LinearCrossEntropy, ManyTokensAreTheSumOfTheirParts) {
  for (const at::Device device : test_devices()) {
    if (device.is_cuda() && !tests_run_on_cpu) continue;  // emulated: 720 million logits
    const int64_t tokens = device.is_cuda() ? 9001 : 161, vocabulary = device.is_cuda() ? 80000 : 40000;
    const int64_t part = (tokens + 1) / 2;
    ASSERT_LT(cross_entropy_rows(tokens, vocabulary, device.is_cpu()), tokens);
    ASSERT_EQ(cross_entropy_rows(part, vocabulary, device.is_cpu()), part);
    const Tensor x = random_tensor({tokens, 64}, at::kBFloat16, device, 1);
    const Tensor w = random_tensor({vocabulary, 64}, at::kBFloat16, device, 2) * 0.05;
    const Tensor targets = random_targets(tokens, vocabulary).to(device);
    const Parameter all = make_parameter(w), parts = make_parameter(w);
    const auto got = linear_cross_entropy(x, all, targets, 0.25, true);
    const auto run = [&](int64_t first, int64_t count) {
      return linear_cross_entropy(x.narrow(0, first, count), parts, targets.narrow(0, first, count), 0.25, true);
    };
    const auto low = run(0, part), high = run(part, tokens - part);
    EXPECT_TRUE(tensors_close(got.loss_sum, low.loss_sum + high.loss_sum, 1e-5, 0));
    EXPECT_TRUE(tensors_close(got.d_x, at::cat({low.d_x, high.d_x}), 1e-2, 1e-5));
    EXPECT_TRUE(tensors_close(all.grad, parts.grad, 1e-3, 1e-3));
  }
}

TEST(LinearCrossEntropy, NothingToTrainIsExactlyZero) {
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const Tensor x = random_tensor({9, 8}, dtype, device, 1);
      const Parameter weight = make_parameter(random_tensor({24, 8}, dtype, device, 2));
      const Tensor targets = at::full({9}, -1, at::device(device).dtype(at::kInt));
      const double scale = std::numeric_limits<double>::infinity();  // 1 / 0 targets
      const auto got = linear_cross_entropy(x, weight, targets, scale, true);
      EXPECT_EQ(got.loss_sum.item<float>(), 0.0f);
      EXPECT_TRUE(tensors_identical(got.d_x, at::zeros_like(x)));
      EXPECT_TRUE(tensors_identical(weight.grad, at::zeros_like(weight.grad)));
    }
  }
}

TEST(LinearCrossEntropy, LargeLogitsStayFinite) {
  for (const at::Device device : test_devices()) {
    const Tensor x = at::ones({1, 1}, device);
    const Tensor w = at::tensor({3e4f, -3e4f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f}).view({9, 1}).to(device);
    const Parameter weight = make_parameter(w);
    const auto got = linear_cross_entropy(x, weight, at::tensor({1}, at::kInt).to(device), 1, true);
    EXPECT_NEAR(got.loss_sum.item<float>(), 6e4, 0.01);
    EXPECT_TRUE(tensors_close(weight.grad.flatten().slice(0, 0, 3), at::tensor({1.0, -1.0, 0.0}), 1e-6, 0));
  }
}

TEST(LinearCrossEntropy, RefusesATargetOutsideTheVocabulary) {
  const Parameter weight = make_parameter(at::ones({4, 3}));
  const Tensor x = at::ones({2, 3});
  EXPECT_THROW(linear_cross_entropy(x, weight, at::tensor({0, 4}, at::kInt), 1, true), Error);
  EXPECT_THROW(linear_cross_entropy(x, weight, at::tensor({0, -2}, at::kInt), 1, true), Error);
  EXPECT_THROW(linear_cross_entropy(x, weight, at::tensor({0}, at::kInt), 1, true), Error);
}

}  // namespace
}  // namespace marrow
