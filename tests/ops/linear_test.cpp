#include "ops/pch.h"
// After the precompiled header:
#include "ops/linear.h"
#include "ops/op_test_support.h"

namespace marrow {
namespace {

TEST(Linear, MatchesPlainComposition) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t tokens : {0, 1, 31, 160}) {
        for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 8}, {13, 7}, {64, 96}}) {
          for (const bool biased : {false, true}) {
            SCOPED_TRACE(
                fmt::format("[{}, {}] → {} {} {} bias {}", tokens, k, n, c10::toString(dtype), device.str(), biased));
            const at::Tensor x = with_grad(random_tensor({tokens, k}, dtype, device, 1));
            const Parameter weight = make_parameter(random_tensor({n, k}, dtype, device, 2));
            const Parameter bias = make_parameter(random_tensor({n}, dtype, device, 3), "bias");
            const at::Tensor dy = random_tensor({tokens, n}, dtype, device, 4);
            WeightGradQueue queue;
            const at::Tensor y = linear(x, weight, queue, biased ? &bias : nullptr);
            y.backward(dy);
            EXPECT_TRUE(tensors_identical(weight.grad, at::zeros_like(weight.grad)));  // put off
            weight.grad.fill_(1.0);
            queue.run_all();

            const at::Tensor rx = reference_leaf(x);
            const at::Tensor rw = reference_leaf(weight.value);
            const at::Tensor rb = reference_leaf(bias.value);
            at::Tensor reference = rx.mm(rw.t());
            if (biased) reference = reference + rb;
            reference.backward(dy.to(at::kCPU, at::kDouble));
            const double tolerance = dtype == at::kFloat ? 2e-5 : 1e-2;
            EXPECT_TRUE(tensors_close(y, reference, tolerance, 3 * tolerance));
            EXPECT_TRUE(tensors_close(x.grad(), rx.grad(), tolerance, 3 * tolerance));
            // bf16 products are exact in fp32: only the sum rounds.
            EXPECT_TRUE(tensors_close(weight.grad, rw.grad() + 1, 1e-5, 1e-4));
            if (!biased) continue;
            EXPECT_TRUE(tensors_close(bias.grad, rb.grad(), 1e-5, 1e-4));
          }
        }
      }
    }
  }
}

TEST(Linear, WeightGradientsAddUpOverMicroBatches) {
  for (const at::Device device : test_devices()) {
    const Parameter weight = make_parameter(random_tensor({5, 6}, at::kFloat, device, 1));
    WeightGradQueue queue;
    at::Tensor expected = at::zeros({5, 6}, device);
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      const at::Tensor x = with_grad(random_tensor({4, 6}, at::kFloat, device, 10 + micro_batch));
      const at::Tensor dy = random_tensor({4, 5}, at::kFloat, device, 20 + micro_batch);
      linear(x, weight, queue).backward(dy);
      expected += dy.t().mm(x.detach());
    }
    queue.run_all();
    EXPECT_TRUE(queue.empty());
    EXPECT_TRUE(tensors_close(weight.grad, expected, 1e-5, 1e-5));
  }
}

TEST(Linear, StridedInputsFrozenWeightAndInference) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      WeightGradQueue queue;
      const Parameter frozen{"w", random_tensor({8, 16}, dtype, device, 1), {}};
      const at::Tensor part = random_tensor({9, 48}, dtype, device, 2).narrow(1, 16, 16);
      const at::Tensor x = with_grad(part);
      const at::Tensor y = linear(x, frozen, queue);
      y.backward(random_tensor({8, 9}, dtype, device, 3).t());  // a transposed gradient
      EXPECT_TRUE(queue.empty());
      EXPECT_TRUE(x.grad().defined());
      EXPECT_TRUE(tensors_close(linear(part, frozen, queue), y, 1e-2, 1e-2));
      const at::NoGradGuard guard;
      EXPECT_FALSE(linear(x, frozen, queue).requires_grad());

      const Parameter weight = make_parameter(frozen.value);
      const at::Tensor dy = random_tensor({8, 9}, dtype, device, 3).t();
      accumulate_weight_grad(weight.grad, dy, part);
      EXPECT_TRUE(
          tensors_close(weight.grad, dy.to(at::kCPU, at::kDouble).t().mm(part.to(at::kCPU, at::kDouble)), 1e-5, 1e-4));
    }
  }
}

}  // namespace
}  // namespace marrow
