// What every operator test needs: devices, random tensors, and comparison that shows where.
#pragma once
#include "ops/pch.h"
// After the precompiled header:
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "ops/parameter.h"

namespace marrow {

inline bool tests_run_on_cpu = true;  // not in test_kernels

// The CPU, and a GPU where one is there and the kernels were built.
inline std::vector<at::Device> test_devices() {
  std::vector<at::Device> devices;
  if (tests_run_on_cpu) devices.emplace_back(at::kCPU);
  if (at::hasCUDA() && at::getNumGPUs() > 0) devices.emplace_back(at::kCUDA, 0);
  return devices;
}

// Normal values · scale, the same on every device for one seed; bf16 is the rounded fp32 value.
inline at::Tensor random_tensor(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device, int64_t seed,
                                double scale = 1.0) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return at::randn(sizes, generator, at::kFloat).mul(scale).to(device, dtype);
}

// A parameter with a zero fp32 gradient.
inline Parameter make_parameter(const at::Tensor& value, const std::string& name = "weight") {
  return {name, value, at::zeros(value.sizes(), value.options().dtype(at::kFloat))};
}

inline at::Tensor with_grad(const at::Tensor& tensor) { return tensor.detach().clone().set_requires_grad(true); }

// An fp64 copy on the CPU that requires a gradient: the input of a plain reference.
inline at::Tensor reference_leaf(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, at::kDouble).clone().set_requires_grad(true);
}

// |actual − expected| ≤ absolute + relative · |expected| everywhere, NaN equal to NaN alone. The
// failure names the first differing coordinate and the largest difference.
inline ::testing::AssertionResult tensors_close(const at::Tensor& actual, const at::Tensor& expected, double relative,
                                                double absolute) {
  if (!actual.defined() || !expected.defined()) {
    if (actual.defined() == expected.defined()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "one of the tensors is undefined";
  }
  if (actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure() << "shape " << actual.sizes() << ", expected " << expected.sizes();
  }
  const at::Tensor got = actual.detach().to(at::kCPU, at::kDouble).contiguous();
  const at::Tensor want = expected.detach().to(at::kCPU, at::kDouble).contiguous();
  const double* a = got.const_data_ptr<double>();
  const double* b = want.const_data_ptr<double>();
  int64_t first = -1, worst = -1, wrong = 0;
  for (int64_t i = 0; i < got.numel(); ++i) {
    const double error = std::abs(a[i] - b[i]);
    const bool equal = a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]));
    if (equal || error <= absolute + relative * std::abs(b[i])) continue;
    ++wrong;
    if (first < 0) first = worst = i;
    if (!(error <= std::abs(a[worst] - b[worst]))) worst = i;
  }
  if (wrong == 0) return ::testing::AssertionSuccess();
  const auto coordinate = [&](int64_t flat) {
    std::string text;
    for (int64_t d = got.dim() - 1; d >= 0; --d) {
      text = fmt::format("{}{}{}", flat % got.size(d), text.empty() ? "" : ", ", text);
      flat /= got.size(d);
    }
    return "[" + text + "]";
  };
  return ::testing::AssertionFailure() << fmt::format(
             "{} of {} elements differ; first at {}: {} instead of {}; worst at {}: {} instead of "
             "{}",
             wrong, got.numel(), coordinate(first), a[first], b[first], coordinate(worst), a[worst], b[worst]);
}

// Same shape, dtype and bits (every NaN counts as equal to a NaN).
inline ::testing::AssertionResult tensors_identical(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.defined() && expected.defined() && actual.scalar_type() != expected.scalar_type()) {
    return ::testing::AssertionFailure() << "dtype " << actual.scalar_type() << ", expected " << expected.scalar_type();
  }
  return tensors_close(actual, expected, 0.0, 0.0);
}

}  // namespace marrow
