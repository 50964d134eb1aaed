#include "ops/optimizer.h"
#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

Tensor scale_of(double value, at::Device device) { return at::full({1}, value, at::device(device).dtype(at::kFloat)); }

// Buffers of n elements. One of them starts at an address of odd alignment, with kAll all do, with kNone none.
struct Buffers {
  static constexpr int kNone = -1, kAll = 5;
  Tensor master, working, grad, exp_avg, exp_avg_sq;
  Buffers(int64_t n, int odd, at::ScalarType moments, at::Device device) {
    const auto part = [&](int which, at::ScalarType dtype, int64_t seed, double scale) {
      const int64_t offset = odd == kAll || odd == which ? 1 : 0;
      return random_tensor({n + offset}, dtype, device, seed, scale).slice(0, offset);
    };
    master = part(0, at::kFloat, 1, 1.0);
    working = part(1, at::kBFloat16, 1, 1.0);
    grad = part(2, at::kFloat, 2, 0.1);
    exp_avg = part(3, moments, 3, 0.01);
    exp_avg_sq = part(4, moments, 4, 0.01).abs_();
  }
  std::vector<Tensor> all() const { return {master, working, grad, exp_avg, exp_avg_sq}; }
};

TEST(Adamw, MatchesTheFormula) {
  for (const at::Device device : test_devices()) {
    for (const auto moments : {at::kFloat, at::kBFloat16}) {
      for (const int64_t n : {0, 1, 7, 1024, 20011}) {
        for (int odd = Buffers::kNone; odd <= Buffers::kAll; ++odd) {
          SCOPED_TRACE(fmt::format("{} {} n={} odd {}", device.str(), c10::toString(moments), n, odd));
          Buffers b(n, odd, moments, device);
          const auto plain = [](const Tensor& t) { return t.cpu().to(at::kDouble); };
          Tensor w = plain(b.master), m = plain(b.exp_avg), v = plain(b.exp_avg_sq);
          AdamwStep step{1e-2, 0.9, 0.95, 1e-8, 0.1, 0, false};
          for (step.step = 1; step.step <= 3; ++step.step) {
            step.zero_grad = step.step == 3;
            const Tensor g = plain(b.grad) * 0.5;
            adamw_update(b.master, b.working, b.grad, b.exp_avg, b.exp_avg_sq, scale_of(0.5, device), step);
            const double t = static_cast<double>(step.step);
            w.mul_(1 - step.lr * step.weight_decay);
            m.lerp_(g, 1 - step.beta1);
            v.mul_(step.beta2).addcmul_(g, g, 1 - step.beta2);
            const Tensor denominator = v.sqrt() / std::sqrt(1 - std::pow(step.beta2, t)) + step.eps;
            w.addcdiv_(m, denominator, -step.lr / (1 - std::pow(step.beta1, t)));
            if (moments == at::kBFloat16) {
              m = m.to(at::kBFloat16).to(at::kDouble);
              v = v.to(at::kBFloat16).to(at::kDouble);
            }
          }
          const bool rounded = moments == at::kBFloat16;  // a tie may round the other way
          EXPECT_TRUE(tensors_close(b.exp_avg, m, rounded ? 8e-3 : 1e-5, 1e-7));
          EXPECT_TRUE(tensors_close(b.exp_avg_sq, v, rounded ? 8e-3 : 1e-5, 1e-9));
          EXPECT_TRUE(tensors_close(b.master, w, 1e-5, rounded ? 1e-3 : 1e-6));
          EXPECT_TRUE(tensors_identical(b.working, b.master.to(at::kBFloat16)));
          EXPECT_EQ(b.grad.count_nonzero().item<int64_t>(), 0);
        }
      }
    }
  }
}

TEST(Adamw, GateLeavesEverythingUntouched) {
  for (const at::Device device : test_devices()) {
    for (const double scale : {0.0, std::nan(""), double{INFINITY}}) {
      Buffers b(1031, Buffers::kNone, at::kFloat, device);
      std::vector<Tensor> before;
      for (const Tensor& t : b.all()) before.push_back(t.clone());
      b.grad.fill_(std::nan(""));
      const AdamwStep step{1e-2, 0.9, 0.95, 1e-8, 0.1, 1, true};
      adamw_update(b.master, b.working, b.grad, b.exp_avg, b.exp_avg_sq, scale_of(scale, device), step);
      before[2].zero_();  // the gradient
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(tensors_identical(b.all()[i], before[i])) << "buffer " << i;
      }
    }
  }
}

// bf16 weights alone would stay at 1.0: a step is below their spacing.
TEST(Adamw, SmallUpdatesSurviveInTheMaster) {
  for (const at::Device device : test_devices()) {
    const auto floats = at::device(device).dtype(at::kFloat);
    Tensor master = at::ones({64}, floats), working = master.to(at::kBFloat16);
    Tensor m = at::zeros({64}, floats), v = at::zeros({64}, floats);
    AdamwStep step{1e-3, 0.9, 0.95, 1e-8, 0.0, 0, false};
    for (step.step = 1; step.step <= 100; ++step.step) {
      adamw_update(master, working, at::full({64}, 0.3, floats), m, v, scale_of(1, device), step);
    }
    EXPECT_TRUE(tensors_close(master, at::full({64}, 0.9), 1e-3, 0));
    EXPECT_TRUE(tensors_identical(working, master.to(at::kBFloat16)));
  }
}

// One matrix, written as the reference does: transposed where tall, normalised, five iterations.
Tensor orthogonal(Tensor u) {
  const bool tall = u.size(0) > u.size(1);
  if (tall) u = u.t();
  u = u / u.norm().clamp_min(1e-7);
  for (int i = 0; i < 5; ++i) {
    const Tensor gram = u.mm(u.t());
    u = u * 3.4445 + (gram * -4.7750 + gram.mm(gram) * 2.0315).mm(u);
  }
  return tall ? u.t() : u;
}

TEST(Muon, MatchesOneMatrixAtATime) {
  for (const at::Device device : test_devices()) {
    for (const auto& sizes :
         std::vector<std::vector<int64_t>>{{1, 1, 1}, {3, 16, 40}, {2, 31, 13}, {4, 64, 64}, {1, 7, 96}, {0, 4, 4}}) {
      SCOPED_TRACE(c10::str(device, " ", sizes));
      const Tensor grad = random_tensor(sizes, at::kFloat, device, 1);
      const Tensor master = random_tensor(sizes, at::kFloat, device, 2, 0.02);
      const Tensor momentum = random_tensor(sizes, at::kFloat, device, 3);
      const Tensor working = master.to(at::kBFloat16);
      Tensor w = master.cpu().to(at::kDouble), m = momentum.cpu().to(at::kDouble);
      const Tensor g = grad.cpu().to(at::kDouble) * 0.5;
      const MuonStep step{0.02, 0.95, 0.1, true};
      muon_update(master, working, grad, momentum, scale_of(0.5, device), step);
      m.lerp_(g, 1 - step.momentum);
      const double size = 0.2 * std::sqrt(static_cast<double>(std::max(sizes[1], sizes[2])));
      for (int64_t i = 0; i < sizes[0]; ++i) {
        w[i].mul_(1 - step.lr * step.weight_decay);
        w[i].sub_(orthogonal(at::lerp(g[i], m[i], step.momentum)), step.lr * size);
      }
      EXPECT_TRUE(tensors_close(momentum, m, 1e-5, 1e-6));
      // The GPU iterates in bf16: each element of the orthogonal matrix within a few percent.
      EXPECT_TRUE(tensors_close(master, w, 1e-5, device.is_cuda() ? 0.1 * step.lr * size : 1e-5));
      EXPECT_TRUE(tensors_identical(working, master.to(at::kBFloat16)));
      EXPECT_EQ(grad.count_nonzero().item<int64_t>(), 0);
    }
  }
}

TEST(Muon, GateLeavesEverythingUntouched) {
  for (const at::Device device : test_devices()) {
    for (const double scale : {0.0, std::nan("")}) {
      const Tensor master = random_tensor({2, 5, 3}, at::kFloat, device, 1);
      const Tensor momentum = random_tensor({2, 5, 3}, at::kFloat, device, 2);
      const Tensor grad = at::full({2, 5, 3}, std::nan(""), device);
      const Tensor before = master.clone(), momentum_before = momentum.clone();
      muon_update(master, {}, grad, momentum, scale_of(scale, device), {0.1, 0.95, 0.1, true});
      EXPECT_TRUE(tensors_identical(master, before));
      EXPECT_TRUE(tensors_identical(momentum, momentum_before));
      EXPECT_EQ(grad.count_nonzero().item<int64_t>(), 0);
    }
  }
}

TEST(Reductions, SumOfSquaresAddsUp) {
  for (const at::Device device : test_devices()) {
    for (const int64_t n : {0, 1, 7, 8, 65536, 400003}) {
      for (const int64_t offset : {0, 1, 3}) {
        const Tensor flat = random_tensor({n + offset}, at::kFloat, device, n, 1e3).slice(0, offset);
        const Tensor total = at::full({1}, 2.5, at::device(device).dtype(at::kDouble));
        add_sum_of_squares(flat, total);
        add_sum_of_squares(flat, total);
        const double expected = 2.5 + 2 * flat.to(at::kDouble).square().sum().item<double>();
        EXPECT_NEAR(total.item<double>(), expected, 1e-12 * expected) << "n = " << n;
      }
    }
  }
}

TEST(Reductions, DoesNotDependOnTheThreads) {
  const Tensor flat = random_tensor({1 << 20}, at::kFloat, at::kCPU, 1);
  const int threads = at::get_num_threads();
  Tensor one = at::zeros({1}, at::kDouble), two = at::zeros({1}, at::kDouble);
  at::set_num_threads(1);
  add_sum_of_squares(flat, one);
  at::set_num_threads(2);
  add_sum_of_squares(flat, two);
  at::set_num_threads(threads);
  EXPECT_EQ(one.item<double>(), two.item<double>());
}

}  // namespace
}  // namespace marrow
