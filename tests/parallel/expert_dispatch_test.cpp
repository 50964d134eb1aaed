#include "ops/pch.h"
// After the precompiled header:
#include <set>

#include "ops/op_test_support.h"
#include "ops/rows.h"
#include "parallel/expert_dispatch.h"
#include "parallel/thread_communicator.h"

namespace marrow {
namespace {

constexpr int64_t kExperts = 128, kTopK = 4, kHidden = 6;

// [ranks · T, k]: `spread` experts are chosen from, beginning at `first`.
at::Tensor choose(int64_t tokens, int64_t first, int64_t spread, uint64_t seed) {
  at::Tensor choices = at::empty({tokens, kTopK}, at::kInt);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < kTopK; ++j) {
      seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
      const auto draw = static_cast<int64_t>((seed >> 33) % static_cast<uint64_t>(spread / kTopK));
      choices[t][j] = (first + j * (spread / kTopK) + draw) % kExperts;  // no expert twice
    }
  }
  return choices;
}

// Expert e multiplies a row by 1 + e/16.
at::Tensor expert_scale(const at::Tensor& experts) { return experts.to(at::kFloat) / 16.0 + 1.0; }

struct Results {
  at::Tensor out, d_x, d_weights;  // of all ranks' tokens
  int64_t rows_sent = 0;
};

// Both ways through the exchange, each rank on a thread with its T tokens.
Results exchange(int64_t ep, bool overlap, const at::Tensor& x, const at::Tensor& choices, const at::Tensor& weights,
                 const at::Tensor& d_out) {
  const int64_t tokens = x.size(0) / ep, own_experts = kExperts / ep;
  Results all{at::full_like(x, NAN), at::full_like(x, NAN), at::full_like(weights, NAN)};
  std::mutex mutex;
  test::run_ranks(ep, [&](Communicator& group) {
    const at::NoGradGuard no_grad;
    const auto own = [&](const at::Tensor& whole) { return whole.narrow(0, group.rank() * tokens, tokens); };
    ExpertDispatch dispatch(group, kExperts, overlap);
    std::vector<at::Tensor> counts;  // of two groups
    for (const auto& half : own(choices).tensor_split(2)) counts.push_back(at::bincount(half.flatten(), {}, kExperts));
    dispatch.plan(own(choices).contiguous(), at::stack(counts).to(at::kInt));
    dispatch.start_dispatch(own(x), own(weights));
    const DispatchedTokens arrived = dispatch.finish_dispatch();
    // This rank's pairs of each row, and what its experts make of it.
    const at::Tensor mine = arrived.experts.ge(0).logical_and(arrived.experts.lt(own_experts));
    const at::Tensor scales = expert_scale(arrived.experts + group.rank() * own_experts).masked_fill(~mine, 0);
    EXPECT_LE(mine.sum().item<int64_t>(), arrived.expert_rows);
    const at::Tensor factor = (scales * arrived.weights).sum(1, true);
    dispatch.start_combine(arrived.rows * factor);
    const at::Tensor back = dispatch.finish_combine();
    const at::Tensor out = sum_rows(back, dispatch.map(), {});

    dispatch.start_combine_backward(gather_rows(own(d_out), dispatch.map(), back.size(0)));
    const at::Tensor d_results = dispatch.finish_combine_backward();
    const at::Tensor d_weights = scales * (arrived.rows * d_results).sum(1, true);
    dispatch.start_dispatch_backward(d_results * factor, d_weights);
    const auto [d_x, d_own_weights] = dispatch.finish_dispatch_backward({});
    const std::lock_guard lock(mutex);
    own(all.out).copy_(out);
    own(all.d_x).copy_(d_x);
    own(all.d_weights).copy_(d_own_weights.view({tokens, kTopK}));
    all.rows_sent += dispatch.rows_sent();
  });
  return all;
}

struct Routing {
  const char* name;
  int64_t first, spread;
};

// All experts, those of two ranks of 64, the last ones; each with no token, with one and with several on a rank.
TEST(ExpertDispatch, EqualsTheExpertsOnOneRankUpTo128Ranks) {
  for (const int64_t ep : {2, 4, 8, 16, 64, 128}) {
    for (const Routing& routing : {Routing{"all", 0, kExperts}, {"four", 8, 4}, {"last", 96, 32}}) {
      for (const int64_t tokens : {0, 1, 7}) {
        if (tokens == 0 && ep > 8) continue;
        SCOPED_TRACE(fmt::format("ep {} {} {} tokens", ep, routing.name, tokens));
        const at::Tensor x = random_tensor({ep * tokens, kHidden}, at::kFloat, at::kCPU, 1);
        const at::Tensor weights = random_tensor({ep * tokens, kTopK}, at::kFloat, at::kCPU, 2);
        const at::Tensor d_out = random_tensor({ep * tokens, kHidden}, at::kFloat, at::kCPU, 3);
        const at::Tensor choices = choose(ep * tokens, routing.first, routing.spread, 5);
        const Results got = exchange(ep, tokens == 7, x, choices, weights, d_out);
        const at::Tensor scales = expert_scale(choices), factor = (scales * weights).sum(1, true);
        EXPECT_TRUE(tensors_close(got.out, x * factor, 1e-5, 1e-5));
        EXPECT_TRUE(tensors_close(got.d_x, d_out * factor, 1e-5, 1e-5));
        EXPECT_TRUE(tensors_close(got.d_weights, scales * (x * d_out).sum(1, true), 1e-5, 1e-5));
        if (ep == 2) continue;  // sends every token to both
        int64_t once = 0;       // for each (token, other rank)
        for (int64_t t = 0; t < ep * tokens; ++t) {
          std::set<int64_t> ranks;
          for (int64_t j = 0; j < kTopK; ++j) ranks.insert(choices[t][j].item<int64_t>() / (kExperts / ep));
          ranks.erase(t / tokens);
          once += std::ssize(ranks);
        }
        EXPECT_EQ(got.rows_sent, once);
      }
    }
  }
}

}  // namespace
}  // namespace marrow
