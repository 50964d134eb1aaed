#include "ops/grouped_linear.h"

#include "ops/device.h"
#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

struct Result {
  Tensor out, d_rows, d_weight;
};

Result run(const Tensor& rows, const Tensor& weight, const Tensor& offsets, const Tensor& d_out,
           const Tensor& initial_grad) {
  const Tensor leaf = with_grad(rows);
  const Parameter parameter{"experts", weight, initial_grad.clone()};
  WeightGradQueue queue;
  const Tensor out = grouped_linear(leaf, parameter, offsets, queue);
  out.backward(d_out);
  EXPECT_TRUE(at::equal(parameter.grad, initial_grad)) << "added before its turn";
  queue.run_all();
  return {out, leaf.grad(), parameter.grad};
}

Tensor offsets_of(const std::vector<int64_t>& counts, at::Device device) {
  return at::tensor(counts).cumsum(0).to(device, at::kInt);
}

const std::vector<std::vector<int64_t>> kCounts = {
    {1},
    {0, 0, 0},
    {5, 0, 3, 1},
    {0, 300, 0, 0, 17, 0},
    {131, 257},
    {0, 1, 0},
    {0, 0, 0, 40},
    {2, 3, 5, 7, 11, 13, 17, 19},
    {0, 1, 67, 128, 0, 509, 2, 0},
    {1500, 0, 37},  // 512 rows an expert: another kernel for weight gradients
};

TEST(GroupedLinear, MatchesOneProductPerExpert) {
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [n, k] : {std::pair<int64_t, int64_t>{7, 13}, {1, 1}, {64, 48}, {40, 136}, {264, 392}}) {
        if (device.is_cuda() && dtype == at::kBFloat16 && n % 8 != 0) continue;  // refused there
        if (dtype == at::kFloat && n > 128) continue;                            // several tiles: for the bf16 kernels
        for (const auto& counts : kCounts) {
          SCOPED_TRACE(fmt::format("{} {} N={} K={} E={} first {}", device.str(), c10::toString(dtype), n, k,
                                   counts.size(), counts[0]));
          const Tensor offsets = offsets_of(counts, device);
          const int64_t total = offsets[-1].item<int64_t>();
          const auto experts = static_cast<int64_t>(counts.size());
          const Tensor rows = random_tensor({total, k}, dtype, device, 1);
          const Tensor weight = random_tensor({experts, n, k}, dtype, device, 2);
          const Tensor d_out = random_tensor({total, n}, dtype, device, 3);
          const Tensor initial = random_tensor({experts, n, k}, at::kFloat, device, 4);
          const Result got = run(rows, weight, offsets, d_out, initial);

          const Tensor rr = reference_leaf(rows), wr = reference_leaf(weight);
          std::vector<Tensor> parts;
          int64_t begin = 0;
          for (int64_t e = 0; e < experts; ++e) {
            parts.push_back(at::mm(rr.narrow(0, begin, counts[e]), wr[e].t()));
            begin += counts[e];
          }
          const Tensor expected = at::cat(parts);
          expected.backward(d_out.cpu().to(at::kDouble));
          const double rounding = dtype == at::kFloat ? 2e-5 : 1e-2;
          EXPECT_TRUE(tensors_close(got.out, expected, rounding, rounding));
          EXPECT_TRUE(tensors_close(got.d_rows, rr.grad(), rounding, rounding));
          const Tensor expected_grad = wr.grad() + initial.cpu();
          EXPECT_TRUE(tensors_close(got.d_weight, expected_grad, 1e-4, 4e-4));  // bf16's products are summed in fp32
          for (int64_t e = 0; e < experts; ++e) {
            if (counts[e] > 0) continue;
            EXPECT_TRUE(tensors_identical(got.d_weight[e], initial[e]));
          }
        }
      }
    }
  }
}

// As many experts as a model has, rows as unevenly spread as a router from random weights spreads them; added twice.
TEST(GroupedLinear, AddsWeightGradientsOfManyExperts) {
  for (const at::Device device : test_devices()) {
    std::vector<int64_t> counts(128);
    for (int64_t e = 0; e < 128; ++e) counts[(e * 37) % 128] = e % 9 == 8 ? 0 : 700 / (e + 1);
    const Tensor offsets = offsets_of(counts, device);
    const int64_t total = offsets[-1].item<int64_t>(), n = 136, k = 200;
    const Tensor rows = random_tensor({total, k}, at::kBFloat16, device, 1);
    const Tensor d_out = random_tensor({total, n}, at::kBFloat16, device, 2);
    const Tensor weight = at::zeros({128, n, k}, rows.options());
    const Tensor once = run(rows, weight, offsets, d_out, at::zeros({128, n, k}, at::device(device))).d_weight;
    const Tensor twice = run(rows, weight, offsets, d_out, once).d_weight;
    const Tensor x = rows.cpu().to(at::kDouble), dy = d_out.cpu().to(at::kDouble);
    int64_t begin = 0;
    for (int64_t e = 0; e < 128; begin += counts[e++]) {
      const Tensor expected = at::mm(dy.narrow(0, begin, counts[e]).t(), x.narrow(0, begin, counts[e]));
      EXPECT_TRUE(tensors_close(once[e], expected, 1e-4, 4e-4)) << "expert " << e << " with " << counts[e] << " rows";
      EXPECT_TRUE(tensors_close(twice[e], 2 * expected, 1e-4, 8e-4)) << "expert " << e;
    }
  }
}

// What GPUs other than Hopper run.
TEST(GroupedLinear, ThePlainProductsAreTheSame) {
  for (const at::Device device : test_devices()) {
    for (const auto& counts : kCounts) {
      const Tensor offsets = offsets_of(counts, device);
      const int64_t total = offsets[-1].item<int64_t>(), experts = static_cast<int64_t>(counts.size());
      if (total == 0) continue;
      const Tensor rows = random_tensor({total, 48}, at::kBFloat16, device, 1);
      const Tensor weight = random_tensor({experts, 64, 48}, at::kBFloat16, device, 2);
      const Tensor d_out = random_tensor({total, 64}, at::kBFloat16, device, 3);
      const Result want = run(rows, weight, offsets, d_out, at::ones(weight.sizes(), at::device(device)));
      EXPECT_TRUE(tensors_close(plain_grouped_product(rows, weight, offsets, true), want.out, 1e-2, 1e-2));
      EXPECT_TRUE(tensors_close(plain_grouped_product(d_out, weight, offsets, false), want.d_rows, 1e-2, 1e-2));
      const Tensor grad = at::ones(weight.sizes(), at::device(device));
      plain_grouped_weight_grad(grad, d_out, rows, offsets);
      EXPECT_TRUE(tensors_close(grad, want.d_weight, 1e-2, 1e-1));
      for (int64_t e = 0; e < experts; ++e) {
        if (counts[e] > 0) continue;
        EXPECT_TRUE(at::equal(grad[e].cpu(), at::ones({64, 48}))) << "expert " << e;
      }
    }
  }
}

TEST(GpuSupport, IsDecidedByComputeCapability) {
  EXPECT_EQ(gpu_support(9, 0), GpuSupport::kTuned);
  EXPECT_EQ(gpu_support(10, 0), GpuSupport::kPlain);
  for (const auto& [major, minor] : {std::pair<int64_t, int64_t>{8, 0}, {8, 9}, {10, 3}, {11, 0}, {12, 0}}) {
    EXPECT_EQ(gpu_support(major, minor), GpuSupport::kNone) << major << "." << minor;
  }
}

TEST(GroupedLinear, InputMajorWeightsGiveTheSame) {
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& counts : kCounts) {
        const Tensor offsets = offsets_of(counts, device);
        const int64_t total = offsets[-1].item<int64_t>(), experts = static_cast<int64_t>(counts.size());
        const Tensor rows = random_tensor({total, 48}, dtype, device, 1);
        const Tensor weight = random_tensor({experts, 64, 48}, dtype, device, 2);
        const Tensor d_out = random_tensor({total, 64}, dtype, device, 3);
        const Result want = run(rows, weight, offsets, d_out, at::zeros_like(weight, at::kFloat));
        const Tensor leaf = with_grad(rows);
        const Parameter turned = make_parameter(weight.transpose(1, 2).contiguous());
        WeightGradQueue queue;
        const Tensor out = grouped_linear(leaf, turned, offsets, queue, /*input_major=*/true);
        out.backward(d_out);
        queue.run_all();
        const double rounding = dtype == at::kFloat ? 2e-5 : 1e-2;
        EXPECT_TRUE(tensors_close(out, want.out, rounding, rounding));
        EXPECT_TRUE(tensors_close(leaf.grad(), want.d_rows, rounding, rounding));
        EXPECT_TRUE(tensors_close(turned.grad, want.d_weight.transpose(1, 2), rounding, 4 * rounding));
      }
    }
  }
}

// Fills blocks as large as the operator's buffers with NaN and frees them.
void poison(at::Device device) {
  for (const int64_t n : {300 * 48, 300 * 64, 8 * 64 * 48}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      at::full({n}, std::nan(""), at::device(device).dtype(dtype));
    }
  }
}

TEST(GroupedLinear, DoesNotReadUninitialisedMemory) {
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      // Seven of eight experts are empty, and rows beyond the last offset belong to none.
      const Tensor offsets = offsets_of({0, 0, 0, 250, 0, 0, 0, 0}, device);
      const Tensor rows = random_tensor({300, 48}, dtype, device, 1);
      const Tensor weight = random_tensor({8, 64, 48}, dtype, device, 2);
      const Tensor d_out = random_tensor({300, 64}, dtype, device, 3);
      const Tensor zero = at::zeros({8, 64, 48}, at::device(device).dtype(at::kFloat));
      const Result clean = run(rows, weight, offsets, d_out, zero);
      poison(device);
      const Tensor bad = rows.clone(), d_bad = d_out.clone();
      bad.slice(0, 250).fill_(std::nan(""));
      d_bad.slice(0, 250).fill_(std::nan(""));
      const Result poisoned = run(bad, weight, offsets, d_bad, zero);
      EXPECT_TRUE(tensors_identical(poisoned.out.slice(0, 0, 250), clean.out.slice(0, 0, 250)));
      EXPECT_TRUE(tensors_identical(poisoned.d_rows.slice(0, 0, 250), clean.d_rows.slice(0, 0, 250)));
      EXPECT_TRUE(tensors_identical(poisoned.d_weight, clean.d_weight));
      EXPECT_EQ(poisoned.d_weight.count_nonzero().item<int64_t>(), 64 * 48);
      EXPECT_EQ(poisoned.d_weight.slice(0, 0, 3).count_nonzero().item<int64_t>(), 0);
    }
  }
}

TEST(GroupedLinear, WithoutGradientBufferQueuesNothing) {
  WeightGradQueue queue;
  const Tensor leaf = with_grad(at::ones({2, 3}));
  const Tensor out = grouped_linear(leaf, {"experts", at::ones({1, 4, 3}), {}}, at::tensor({2}, at::kInt), queue);
  out.backward(at::ones({2, 4}));
  EXPECT_TRUE(queue.empty());
  EXPECT_TRUE(tensors_close(leaf.grad(), at::full({2, 3}, 4.0), 0, 0));
}

TEST(GroupedLinear, RefusesWhatDoesNotFit) {
  WeightGradQueue queue;
  const Parameter weight = make_parameter(at::ones({2, 4, 3}));
  const Tensor offsets = at::tensor({1, 2}, at::kInt);
  EXPECT_THROW(grouped_linear(at::ones({2, 5}), weight, offsets, queue), Error);
  EXPECT_THROW(grouped_linear(at::ones({2, 3}, at::kBFloat16), weight, offsets, queue), Error);
  EXPECT_THROW(grouped_linear(at::ones({2, 3}), weight, offsets.slice(0, 1), queue), Error);
}

}  // namespace
}  // namespace marrow
