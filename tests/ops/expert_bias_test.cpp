#include "ops/expert_bias.h"

#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

// Rows of each expert, and their width: in packs and not.
const std::vector<std::pair<std::vector<int64_t>, int64_t>> kCases = {
    {{1}, 13},        {{0, 0, 0}, 8},        {{5, 0, 3, 1}, 13}, {{0, 300, 0, 0, 17, 0}, 264},
    {{131, 257}, 32}, {{0, 0, 0, 40}, 1000}, {{0, 1, 0}, 1},     {{2, 3, 5, 7, 11, 13, 17, 19}, 104},
};

TEST(ExpertBias, MatchesPlainCompositionAndIgnoresRowsOfNoExpert) {
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [counts, width] : kCases) {
        for (const bool weighted : {false, true}) {
          SCOPED_TRACE(fmt::format("{} {} E={} first {} width {} weighted {}", device.str(), c10::toString(dtype),
                                   counts.size(), counts[0], width, weighted));
          const Tensor offsets = at::tensor(counts).cumsum(0).to(device, at::kInt);
          const int64_t total = offsets[-1].item<int64_t>(), experts = static_cast<int64_t>(counts.size());
          const Tensor rows = with_grad(random_tensor({total + 3, width}, dtype, device, 1));
          const Tensor weights = weighted ? with_grad(random_tensor({total + 3}, at::kFloat, device, 2)) : Tensor();
          const Parameter bias = make_parameter(random_tensor({experts, width}, dtype, device, 3));
          bias.grad.fill_(0.25);
          Tensor d_out = random_tensor({total + 3, width}, dtype, device, 4);
          d_out.slice(0, total).fill_(std::nan(""));
          WeightGradQueue queue;
          const Tensor out = add_expert_bias_(rows.clone(), bias, offsets, weights, queue);
          out.backward(d_out);
          EXPECT_TRUE(bias.grad.eq(0.25).all().item<bool>()) << "added before its turn";
          queue.run_all();

          const Tensor expert = at::arange(experts).repeat_interleave(at::tensor(counts));
          const Tensor x = reference_leaf(rows.slice(0, 0, total)), b = reference_leaf(bias.value);
          const Tensor w = weighted ? reference_leaf(weights.slice(0, 0, total)) : at::ones({total}, at::kDouble);
          const Tensor reference = x + b.index_select(0, expert) * w.unsqueeze(1);
          reference.backward(d_out.slice(0, 0, total).cpu().to(at::kDouble));
          const double rounding = dtype == at::kFloat ? 2e-5 : 1e-2;
          EXPECT_TRUE(tensors_close(out.slice(0, 0, total), reference, rounding, rounding));
          EXPECT_TRUE(tensors_identical(rows.grad().slice(0, 0, total), d_out.slice(0, 0, total)));
          EXPECT_TRUE(tensors_close(bias.grad - 0.25, b.grad(), 1e-4, 1e-4));
          if (!weighted) continue;
          EXPECT_TRUE(tensors_close(weights.grad().slice(0, 0, total), w.grad(), rounding, width * rounding));
        }
      }
    }
  }
}

}  // namespace
}  // namespace marrow
