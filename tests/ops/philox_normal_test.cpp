#include "ops/pch.h"
// After the precompiled header:
#include "ops/op_test_support.h"
#include "ops/philox_normal.h"

namespace marrow {
namespace {

at::Tensor normals(int64_t n, int64_t seed, std::string_view name, int64_t first, double std = 1.0,
                   at::ScalarType dtype = at::kFloat, at::Device device = at::kCPU) {
  at::Tensor out = at::full({n}, NAN, at::TensorOptions(dtype).device(device));
  philox_normal(out, seed, name, first, std);
  return out;
}

// The expected values come from Philox4x32-10 and Box-Muller in fp64 (Python).
TEST(PhiloxNormal, KnownAnswers) {
  struct Answer {
    int64_t seed;
    const char* name;
    int64_t element;
    double value;
  };
  const Answer answers[] = {
      {0, "embedding", 0, -1.715016026987087},
      {0, "embedding", 1, -1.114416177494353},
      {0, "embedding", 2, -0.3005147442288085},
      {0, "embedding", 3, 0.36741735007419524},
      {0, "embedding", 4, -0.6967676649717217},
      {42, "layers.3.experts.down", 5, -1.919853768804407},
      {42, "layers.3.experts.down", 123456789012, -0.9321631941361048},
      {-1, "", 7, 0.8650461701251262},
  };
  for (const Answer& answer : answers) {
    const double got = normals(1, answer.seed, answer.name, answer.element).item<float>();
    EXPECT_NEAR(got, answer.value, 4e-7 * std::abs(answer.value)) << answer.name;
  }
}

// Bits, so that a compiler that fuses products and sums is found out.
TEST(PhiloxNormal, BitsAreFixed) {
  const at::Tensor values = normals(1 << 16, 7, "layers.0.qkv", 3);
  const auto* bits = reinterpret_cast<const uint32_t*>(values.const_data_ptr<float>());
  uint64_t hash = 0;
  for (int64_t i = 0; i < values.numel(); ++i) hash = hash * 0x100000001b3u + bits[i];
  EXPECT_EQ(hash, 14412767942950821919u);
}

TEST(PhiloxNormal, EveryCutOfATensorGivesTheSameElements) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor whole = normals(10007, 5, "w", 0, 0.02, dtype, device);
      for (const int64_t first : {0, 1, 2, 3, 4, 4095, 9973}) {
        for (const int64_t n : {0, 1, 3, 5, 34}) {
          EXPECT_TRUE(tensors_identical(normals(n, 5, "w", first, 0.02, dtype, device), whole.narrow(0, first, n)))
              << first << " + " << n;
        }
      }
    }
  }
}

TEST(PhiloxNormal, LogUniformIsWhatItsNameSays) {
  for (const at::Device device : test_devices()) {
    const at::Tensor whole = at::empty({20000}, at::TensorOptions(at::kFloat).device(device));
    philox_log_uniform(whole, 3, "layers.0.a_log", 0, 16);
    const at::Tensor part = at::empty({7}, whole.options());
    philox_log_uniform(part, 3, "layers.0.a_log", 4321, 16);
    EXPECT_TRUE(tensors_identical(part, whole.narrow(0, 4321, 7)));
    const at::Tensor x = whole.cpu().to(at::kDouble).exp();
    EXPECT_NEAR(x.min().item<double>(), 0.01, 1e-6);
    EXPECT_LE(x.max().item<double>(), 16.0001);
    EXPECT_NEAR(x.mean().item<double>(), 8, 4 * 16 / std::sqrt(12 * 20000.0));
    EXPECT_NEAR(x.var().item<double>(), 256 / 12.0, 0.5);
  }
}

TEST(PhiloxNormal, EqualOnEveryDevice) {
  for (const at::Device device : test_devices()) {
    const int64_t far = int64_t{1} << 40;
    EXPECT_TRUE(tensors_identical(normals(1 << 21, 11, "head", far, 0.02, at::kFloat, device).cpu(),
                                  normals(1 << 21, 11, "head", far, 0.02)));
  }
}

TEST(PhiloxNormal, Bf16IsTheRoundedFp32Value) {
  for (const at::Device device : test_devices()) {
    EXPECT_TRUE(tensors_identical(normals(1001, 1, "w", 0, 0.02, at::kBFloat16, device),
                                  normals(1001, 1, "w", 0, 0.02, at::kFloat, device).to(at::kBFloat16)));
  }
}

TEST(PhiloxNormal, MomentsAndTailsAreThoseOfANormal) {
  const int64_t n = 1 << 22;
  const at::Tensor x = normals(n, 3, "moments", 0).to(at::kDouble);
  const double error = 1.0 / std::sqrt(static_cast<double>(n));
  EXPECT_NEAR(x.mean().item<double>(), 0.0, 4 * error);
  EXPECT_NEAR(x.pow(2).mean().item<double>(), 1.0, 4 * error * std::sqrt(2.0));
  EXPECT_NEAR(x.pow(3).mean().item<double>(), 0.0, 4 * error * std::sqrt(15.0));
  EXPECT_NEAR(x.pow(4).mean().item<double>(), 3.0, 4 * error * std::sqrt(96.0));
  for (const double z : {-3.0, -1.0, -0.1, 0.0, 0.5, 2.0, 4.0}) {  // the distribution function
    const double want = 0.5 * std::erfc(-z / std::sqrt(2.0));
    EXPECT_NEAR(x.lt(z).to(at::kDouble).mean().item<double>(), want, 4 * error * std::sqrt(want * (1 - want))) << z;
  }
  // Neighbours (of one Box-Muller pair, and of one block) do not correlate.
  for (const int64_t lag : {1, 2, 3, 4}) {
    EXPECT_NEAR((x.narrow(0, 0, n - lag) * x.narrow(0, lag, n - lag)).mean().item<double>(), 0.0, 4.5 * error) << lag;
  }
  EXPECT_TRUE(x.isfinite().all().item<bool>());
}

TEST(PhiloxNormal, SeedsAndNamesGiveOtherValues) {
  const at::Tensor x = normals(64, 1, "layers.0.experts.gate_up", 0);
  EXPECT_GT((x - normals(64, 2, "layers.0.experts.gate_up", 0)).abs().min().item<float>(), 0.0f);
  EXPECT_GT((x - normals(64, 1, "layers.1.experts.gate_up", 0)).abs().min().item<float>(), 0.0f);
}

}  // namespace
}  // namespace marrow
