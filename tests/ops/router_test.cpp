#include "ops/router.h"

#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

struct Case {
  int64_t tokens, hidden, experts, top_k, groups;
  bool normalize = true;
  double scale = 1.0;
  bool bias = false, balance = false, forced = false, sigmoid = false;
  int64_t expert_groups = 1, top_groups = 1;
};

const std::vector<Case> kCases = {
    {1, 3, 2, 1, 1},
    {7, 13, 5, 2, 7, true, 1.0, false, true},
    {64, 32, 16, 4, 4, true, 2.5, true, true},
    {33, 40, 130, 8, 3, false, 1.5, false, true},
    {257, 24, 8, 8, 1, false, 1.0, true, false},
    {96, 64, 128, 8, 2, true, 1.0, false, true, true},
    {5000, 16, 32, 4, 2, true, 1.0, false, true},
    {30, 8, 500, 32, 1, true, 1.0, false, true},
    {0, 8, 4, 2, 1, true, 1.0, false, true},
    {0, 8, 4, 2, 1, true, 1.0, true, true, false, true, 2, 1},
    {65, 16, 24, 6, 5, false, 16.0, false, true, false, false, 8, 3},  // as DeepSeek-V2
    {50, 12, 20, 3, 2, false, 1.0, true, true, false, false, 5, 2},
    {34, 16, 64, 6, 2, true, 2.446, true, true, false, true},       // as Moonlight
    {70, 16, 256, 8, 1, true, 2.5, true, true, false, true, 8, 4},  // as DeepSeek-V3
    {70, 16, 15, 4, 7, false, 1.5, false, true, false, true, 3, 2},
    {40, 16, 160, 4, 2, true, 1.5, true, false, true, true, 8, 1},
    {257, 8, 96, 4, 1, true, 1.0, true, true, false, true, 32, 20},
};

struct Routed {
  RouterOutput out;
  Tensor d_x, d_weight;
};

Routed run(const Tensor& x, const Tensor& weight, const Tensor& bias, const Case& c, const Tensor& d_weights,
           const std::shared_ptr<RouterBalance>& balance) {
  const Tensor leaf = with_grad(x);
  const Parameter parameter = make_parameter(weight);
  WeightGradQueue queue;
  const RouterOutput out =
      router(leaf, parameter, bias, c.groups,
             {c.top_k, c.normalize, c.scale, c.forced, c.sigmoid, c.expert_groups, c.top_groups}, balance, queue);
  out.weights.backward(d_weights);
  queue.run_all();
  return {out, leaf.grad(), parameter.grad};
}

// scores [T, E] with −1e9 for the experts of each token's worse groups.
Tensor of_best_groups(const Tensor& scores, const Case& c) {
  const Tensor grouped = scores.unflatten(1, {c.expert_groups, -1});
  const Tensor of_groups = c.sigmoid ? std::get<0>(grouped.sort(2, true)).narrow(2, 0, 2).sum(2) : grouped.amax({2});
  const Tensor best = std::get<1>(of_groups.sort(1, true)).narrow(1, 0, c.top_groups);
  const Tensor allowed =
      at::zeros_like(of_groups).scatter(1, best, 1.0).repeat_interleave(c.experts / c.expert_groups, 1);
  return scores.masked_fill(allowed.eq(0), -1e9);
}

// The chosen experts are k different ones, by falling score, and none left out scores higher.
void expect_best(const Tensor& chosen, const Tensor& scores) {
  const Tensor ids = chosen.cpu().to(at::kLong);
  const Tensor values = scores.gather(1, ids);
  if (ids.size(1) > 1) {
    EXPECT_GE((values.slice(1, 0, -1) - values.slice(1, 1)).min().item<double>(), -1e-5);
  }
  const Tensor rest = scores.scatter(1, ids, -1e9);
  EXPECT_GE((values.amin({1}) - rest.amax({1})).min().item<double>(), -1e-5);
}

TEST(Router, MatchesPlainComposition) {
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const Case& c : kCases) {
        SCOPED_TRACE(fmt::format("{} {} T={} H={} E={} k={} G={}{}, best {} of {} groups", device.str(),
                                 c10::toString(dtype), c.tokens, c.hidden, c.experts, c.top_k, c.groups,
                                 c.sigmoid ? " sigmoid" : "", c.top_groups, c.expert_groups));
        const Tensor x = random_tensor({c.tokens, c.hidden}, dtype, device, 1);
        const Tensor w = random_tensor({c.experts, c.hidden}, dtype, device, 2, 0.5);
        const Tensor bias = c.bias ? random_tensor({c.experts}, at::kFloat, device, 3, 0.1) : Tensor();
        const Tensor d_weights = random_tensor({c.tokens, c.top_k}, at::kFloat, device, 4);
        const auto balance = std::make_shared<RouterBalance>();
        if (c.balance) {
          balance->gradient = random_tensor({c.groups, c.experts}, at::kFloat, device, 5);
          balance->z_loss_gradient = 0.01;
        }
        const Routed got = run(x, w, bias, c, d_weights, balance);

        const Tensor xr = reference_leaf(x), wr = reference_leaf(w);
        const Tensor logits = at::mm(xr, wr.t());
        const Tensor scores = c.sigmoid ? logits.sigmoid() : logits.softmax(1);
        const Tensor p = scores / scores.sum(1, true);
        const Tensor ids = got.out.experts.cpu().to(at::kLong);
        if (c.forced) {
          EXPECT_TRUE(at::equal(ids.flatten(), at::arange(c.tokens * c.top_k) % c.experts));
        } else if (c.tokens > 0) {
          const Tensor choice = c.bias ? scores.detach() + bias.cpu() : scores.detach();
          expect_best(ids, c.top_groups < c.expert_groups ? of_best_groups(choice, c) : choice);
        }
        Tensor weights = scores.gather(1, ids);
        if (c.normalize) weights = weights / weights.sum(1, true);
        weights = weights * c.scale;
        const Tensor lse2 = logits.logsumexp(1).square().sum();
        Tensor objective = (weights * d_weights.cpu()).sum();
        if (c.balance) {
          const Tensor d_p = balance->gradient.cpu().repeat_interleave(c.tokens / c.groups, 0);
          objective = objective + (p * d_p).sum() + 0.01 * lse2;
        }
        objective.backward();

        EXPECT_TRUE(tensors_close(got.out.weights, weights, 1e-5, 1e-6));
        const Tensor grouped = p.detach().view({c.groups, c.tokens / c.groups, c.experts}).sum(1);
        EXPECT_TRUE(tensors_close(got.out.probability_sums, grouped, 1e-5, 1e-5));
        EXPECT_TRUE(tensors_close(got.out.z_sum, lse2.detach().view({1}), 1e-5, 1e-5));
        Tensor counts = at::zeros({c.groups, c.experts}, at::kLong);
        counts.scatter_add_(1, ids.view({c.groups, -1}), at::ones({c.groups, ids.numel() / c.groups}, at::kLong));
        EXPECT_TRUE(at::equal(got.out.counts.cpu().to(at::kLong), counts));
        const double rounding = dtype == at::kFloat ? 1e-5 : 1e-2;
        EXPECT_TRUE(tensors_close(got.d_x, xr.grad(), rounding, rounding));
        // Sums of fp32 gradients, whatever the working dtype.
        EXPECT_TRUE(tensors_close(got.d_weight, wr.grad(), 1e-4, 1e-4 + 1e-6 * c.tokens));
      }
    }
  }
}

// A bias acts as the weight of an input that is always 1.
TEST(Router, ABiasIsTheWeightOfAConstantInput) {
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t tokens : {0, 1, 96}) {
        const Tensor x = random_tensor({tokens, 24}, dtype, device, 1);
        const Tensor w = random_tensor({16, 24}, dtype, device, 2, 0.5), b = random_tensor({16}, dtype, device, 3, 0.5);
        const Tensor d_weights = random_tensor({tokens, 4}, at::kFloat, device, 4);
        const auto balance = std::make_shared<RouterBalance>();
        balance->gradient = random_tensor({1, 16}, at::kFloat, device, 5);
        balance->z_loss_gradient = 0.01;
        const auto padded = [](const Tensor& all, const Tensor& last) {
          return at::cat({all, last, at::zeros({all.size(0), 7}, all.options())}, 1);
        };
        const Routed wide = run(padded(x, at::ones({tokens, 1}, x.options())), padded(w, b.unsqueeze(1)), {},
                                {tokens, 32, 16, 4, 1}, d_weights, balance);
        const Tensor leaf = with_grad(x);
        const Parameter weight = make_parameter(w);
        WeightGradQueue queue;
        RouterOptions options;
        options.top_k = 4;
        options.bias = make_parameter(b, "bias");
        const RouterOutput out = router(leaf, weight, {}, 1, options, balance, queue);
        out.weights.backward(d_weights);
        queue.run_all();
        EXPECT_TRUE(at::equal(out.experts, wide.out.experts));
        EXPECT_TRUE(tensors_close(out.weights, wide.out.weights, 1e-5, 1e-5));
        EXPECT_TRUE(tensors_close(out.probability_sums, wide.out.probability_sums, 1e-5, 1e-5));
        EXPECT_TRUE(tensors_close(leaf.grad(), wide.d_x.slice(1, 0, 24), 1e-2, 1e-2));
        EXPECT_TRUE(tensors_close(weight.grad, wide.d_weight.slice(1, 0, 24), 1e-4, 1e-4));
        EXPECT_TRUE(tensors_close(options.bias.grad, wide.d_weight.select(1, 24), 1e-4, 1e-4));
      }
    }
  }
}

// Each token's gradient of the logits shows in one column of the weight's gradient: x is one-hot.
TEST(Router, BalanceLossReachesTheLogits) {
  for (const at::Device device : test_devices()) {
    const Tensor x = at::eye(2, at::device(device).dtype(at::kFloat));
    const Tensor w = at::tensor({std::log(3.0f), std::log(3.0f), 0.0f, 0.0f}).view({2, 2}).to(device);
    for (const double coefficient : {0.0, 1.0, 2.0}) {
      const Case c{2, 2, 2, 1, 1};
      const auto balance = std::make_shared<RouterBalance>();
      const Tensor leaf = with_grad(x);
      const Parameter parameter = make_parameter(w);
      WeightGradQueue queue;
      const RouterOutput out = router(leaf, parameter, {}, 1, {c.top_k, true, 1.0}, balance, queue);
      EXPECT_NEAR(balance_loss(out.counts, out.probability_sums, 2, 1).item<double>(), 1.5, 1e-6);
      balance->gradient = balance_gradient(expert_fractions(out.counts, 2, 1), 2, coefficient);
      out.weights.backward(at::zeros_like(out.weights));
      queue.run_all();
      const Tensor expected = at::tensor({0.1875f, 0.1875f, -0.1875f, -0.1875f}).view({2, 2}) * coefficient;
      EXPECT_TRUE(tensors_close(parameter.grad, expected, 0.0, coefficient == 0 ? 0.0 : 1e-6));
    }
  }
}

double collapse_value(const Tensor& logits, int64_t top_k) {
  WeightGradQueue queue;
  const Tensor x = at::eye(logits.size(0));
  const RouterOutput out = router(x, make_parameter(logits.t().contiguous()), {}, 1, {top_k}, {}, queue);
  return balance_loss(out.counts, out.probability_sums, logits.size(0), top_k).item<double>();
}

TEST(Router, BalanceLossHasOneDefinition) {
  const int64_t tokens = 16;
  Tensor one = at::zeros({tokens, 8});
  one.select(1, 3).fill_(60.0);
  EXPECT_NEAR(collapse_value(one, 1), 8.0, 1e-5);
  Tensor two = at::full({tokens, 8}, -60.0);
  two.narrow(1, 2, 2).zero_();
  EXPECT_NEAR(collapse_value(two, 2), 4.0, 1e-5);
  for (const int64_t top_k : {1, 2}) {  // uniform probabilities, experts in turn
    const Tensor counts = at::full({1, 8}, tokens * top_k / 8, at::kInt);
    const Tensor sums = at::full({1, 8}, tokens / 8.0);
    EXPECT_NEAR(balance_loss(counts, sums, tokens, top_k).item<double>(), 1.0, 1e-6);
  }
}

TEST(Router, EqualLogitsGoToLowerIds) {
  for (const at::Device device : test_devices()) {
    WeightGradQueue queue;
    const Tensor x = at::ones({3, 4}, device);
    const Tensor w = at::zeros({70, 4}, device);
    const RouterOutput out = router(x, make_parameter(w), {}, 1, {5}, {}, queue);
    EXPECT_TRUE(at::equal(out.experts.cpu(), at::arange(5, at::kInt).expand({3, 5})));
    EXPECT_TRUE(tensors_close(out.weights, at::full({3, 5}, 0.2), 1e-6, 0));
  }
}

TEST(Router, ForcedExpertsOfVanishingProbabilityHaveFiniteWeights) {
  for (const at::Device device : test_devices()) {
    WeightGradQueue queue;
    const Tensor x = at::ones({8, 1}, device);
    Tensor w = at::zeros({8, 1}, device);
    w[7][0] = 500.0;
    const RouterOutput out = router(x, make_parameter(w), {}, 1, {2, true, 1.0, true}, {}, queue);
    EXPECT_TRUE(tensors_close(out.weights.sum(1), at::ones({8}), 1e-6, 0));
    EXPECT_TRUE(tensors_close(out.weights[0], at::full({2}, 0.5), 1e-6, 0));
  }
}

TEST(Router, NotANumberKeepsIdsValidAndShowsInTheWeights) {
  for (const at::Device device : test_devices()) {
    WeightGradQueue queue;
    const Tensor x = at::full({2, 3}, std::nanf(""), device);
    const Tensor w = at::ones({6, 3}, device);
    const RouterOutput out = router(x, make_parameter(w), {}, 1, {3}, {}, queue);
    EXPECT_EQ(out.counts.sum().item<int64_t>(), 6);
    EXPECT_TRUE(out.weights.isnan().all().item<bool>());
  }
}

TEST(Router, RefusesWhatDoesNotFit) {
  WeightGradQueue queue;
  const Parameter w = make_parameter(at::ones({4, 3}));
  EXPECT_THROW(router(at::ones({2, 5}), w, {}, 1, {1}, {}, queue), Error);
  EXPECT_THROW(router(at::ones({2, 3}), w, {}, 1, {5}, {}, queue), Error);
  EXPECT_THROW(router(at::ones({3, 3}), w, {}, 2, {1}, {}, queue), Error);
  const auto with_groups = [&](int64_t top_k, int64_t groups, int64_t top_groups, bool sigmoid) {
    router(at::ones({2, 3}), w, {}, 1, {top_k, true, 1.0, false, sigmoid, groups, top_groups}, {}, queue);
  };
  EXPECT_THROW(with_groups(1, 3, 1, false), Error);  // 4 experts
  EXPECT_THROW(with_groups(3, 2, 1, false), Error);
  EXPECT_THROW(with_groups(1, 2, 3, false), Error);
  EXPECT_THROW(with_groups(1, 4, 2, true), Error);  // a group's two best
  EXPECT_NO_THROW(with_groups(2, 2, 1, true));
}

}  // namespace
}  // namespace marrow
