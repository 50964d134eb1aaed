#include "ops/pch.h"
// After the precompiled header:
#include "ops/op_test_support.h"
#include "ops/swiglu.h"

namespace marrow {
namespace {

at::Tensor plain_swiglu(const at::Tensor& gate_up, const at::Tensor& row_weight) {
  const auto parts = gate_up.chunk(2, 1);
  const at::Tensor y = at::silu(parts[0]) * parts[1];
  return row_weight.defined() ? y * row_weight.unsqueeze(1) : y;
}

TEST(Swiglu, MatchesPlainComposition) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t rows : {0, 1, 13, 257}) {
        for (const int64_t width : {1, 8, 13, 48, 768}) {
          for (const bool weighted : {false, true}) {
            SCOPED_TRACE(
                fmt::format("[{}, 2·{}] {} {} weighted {}", rows, width, c10::toString(dtype), device.str(), weighted));
            const at::Tensor gate_up = with_grad(random_tensor({rows, 2 * width}, dtype, device, 1, 3.0));
            const at::Tensor weight = weighted ? with_grad(random_tensor({rows}, at::kFloat, device, 2)) : at::Tensor();
            const at::Tensor d = random_tensor({rows, width}, dtype, device, 3);
            const at::Tensor y = swiglu(gate_up, weight);
            EXPECT_EQ(y.scalar_type(), dtype);
            y.backward(d);

            const at::Tensor reference_in = reference_leaf(gate_up);
            const at::Tensor reference_weight = weighted ? reference_leaf(weight) : at::Tensor();
            const at::Tensor reference = plain_swiglu(reference_in, reference_weight);
            reference.backward(d.to(at::kCPU, at::kDouble));
            const double relative = dtype == at::kFloat ? 5e-6 : 5e-3;
            const double absolute = dtype == at::kFloat ? 5e-6 : 1e-5;
            EXPECT_TRUE(tensors_close(y, reference, relative, absolute));
            EXPECT_TRUE(tensors_close(gate_up.grad(), reference_in.grad(), relative, absolute));
            if (!weighted) continue;
            EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
            EXPECT_TRUE(tensors_close(weight.grad(), reference_weight.grad(), 2e-5, 2e-4));
          }
        }
      }
    }
  }
}

TEST(Swiglu, ClampedMatchesPlainComposition) {
  constexpr double kAlpha = 1.702, kLimit = 2.5;
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t rows : {0, 1, 13, 257}) {
        for (const int64_t width : {1, 13, 48}) {
          SCOPED_TRACE(fmt::format("[{}, 2·{}] {} {}", rows, width, c10::toString(dtype), device.str()));
          at::Tensor gate_up = random_tensor({rows, 2 * width}, dtype, device, 1, 3.0);
          if (rows > 0) gate_up[0].fill_(kLimit);  // at the limit the gradient still flows
          gate_up = with_grad(gate_up);
          const at::Tensor weight = with_grad(random_tensor({rows}, at::kFloat, device, 2));
          const at::Tensor d = random_tensor({rows, width}, dtype, device, 3);
          const at::Tensor y = clamped_swiglu(gate_up, weight, kAlpha, kLimit);
          EXPECT_EQ(y.scalar_type(), dtype);
          y.backward(d);

          const at::Tensor x = reference_leaf(gate_up), w = reference_leaf(weight);
          const at::Tensor gate = x.slice(1, 0, {}, 2).clamp_max(kLimit),
                           up = x.slice(1, 1, {}, 2).clamp(-kLimit, kLimit);
          const at::Tensor reference = (up + 1) * gate * at::sigmoid(gate * kAlpha) * w.unsqueeze(1);
          reference.backward(d.to(at::kCPU, at::kDouble));
          const double relative = dtype == at::kFloat ? 5e-6 : 5e-3;
          const double absolute = dtype == at::kFloat ? 5e-6 : 1e-5;
          EXPECT_TRUE(tensors_close(y, reference, relative, absolute));
          EXPECT_TRUE(tensors_close(gate_up.grad(), x.grad(), relative, absolute));
          EXPECT_TRUE(tensors_close(weight.grad(), w.grad(), 2e-5, 2e-4));
        }
      }
    }
  }
}

// All rows alike up to the last of offsets; behind it a GPU writes nothing, which the emulator's memory, NaN, shows.
TEST(Swiglu, StopsAtTheRowsThatExist) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t width : {13, 48}) {
        for (const int64_t end : {0, 9, 16, 21}) {
          for (const bool clamped : {false, true}) {
            SCOPED_TRACE(fmt::format("{} of 21, 2·{} {} {} clamped {}", end, width, c10::toString(dtype), device.str(),
                                     clamped));
            const auto run = [&](const at::Tensor& offsets) {
              const at::Tensor gate_up = with_grad(random_tensor({21, 2 * width}, dtype, device, 1));
              const at::Tensor weight = with_grad(random_tensor({21}, at::kFloat, device, 2));
              const at::Tensor y =
                  clamped ? clamped_swiglu(gate_up, weight, 1.7, 2.5, offsets) : swiglu(gate_up, weight, offsets);
              y.backward(random_tensor({21, width}, dtype, device, 3));
              return std::array{y.detach(), gate_up.grad(), weight.grad()};
            };
            const auto got = run(at::tensor({end / 2, end}).to(device, at::kInt)), want = run({});
            for (size_t i = 0; i < got.size(); ++i) {
              EXPECT_TRUE(tensors_identical(got[i].slice(0, 0, end), want[i].slice(0, 0, end)));
              EXPECT_TRUE(tests_run_on_cpu || got[i].slice(0, end).isnan().all().item<bool>());
            }
          }
        }
      }
    }
  }
}

TEST(Swiglu, ExtremeGatesStayFinite) {
  for (const at::Device device : test_devices()) {
    const at::Tensor gate = at::tensor({-1e4f, -200.0f, -88.0f, -87.0f, -0.0f, 87.0f, 200.0f, 1e4f});
    const at::Tensor gate_up = with_grad(at::cat({gate, at::ones(8)}).unsqueeze(0).to(device));
    const at::Tensor y = swiglu(gate_up);
    y.sum().backward();
    EXPECT_TRUE(tensors_close(y, at::tensor({0.0, 0.0, 0.0, 0.0, 0.0, 87.0, 200.0, 1e4}).unsqueeze(0), 1e-6, 1e-30));
    EXPECT_TRUE(gate_up.grad().isfinite().all().item<bool>()) << gate_up.grad();
    const at::Tensor broken = swiglu(at::full({1, 2}, NAN, at::TensorOptions().device(device)));
    EXPECT_TRUE(broken.isnan().all().item<bool>());  // never swallowed
  }
}

TEST(Swiglu, StridedInputFrozenWeightAndInference) {
  for (const at::Device device : test_devices()) {
    const at::Tensor wide = random_tensor({11, 64}, at::kFloat, device, 1);
    const at::Tensor weight = random_tensor({22}, at::kFloat, device, 2).slice(0, 0, 22, 2);
    const at::Tensor part = wide.narrow(1, 16, 32);
    const at::Tensor x = with_grad(part);
    const at::Tensor y = swiglu(x, weight);
    EXPECT_TRUE(tensors_identical(y, swiglu(part, weight.contiguous())));
    y.t().contiguous().t().sum().backward();
    EXPECT_TRUE(x.grad().defined());
    EXPECT_FALSE(weight.grad().defined());
    EXPECT_FALSE(swiglu(part, weight).requires_grad());
  }
}

}  // namespace
}  // namespace marrow
