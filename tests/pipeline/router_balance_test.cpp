// The balance losses through the whole model: gradient, layout, and the logged value.
#include "toy_model.h"

namespace marrow::test {
namespace {

at::Tensor router_gradient(ToyModel& toy) { return toy.parameter("layers.1.router").grad.clone(); }

// The language-model gradient is switched off: only the balance term acts.
at::Tensor balance_only(const ToyOptions& options, int64_t micro_batch, int64_t sequences) {
  ToyModel toy(options);
  const auto tokens = std::vector<std::vector<int32_t>>(sequences, random_tokens(1, 32, 21)[0]);
  if (options.balance == BalanceMode::kGlobal) {  // the gradient comes with the second step
    toy.accumulate(tokens, shifted(tokens), micro_batch, 0.0);
    EXPECT_EQ(router_gradient(toy).abs().max().item<double>(), 0.0);
  }
  toy.accumulate(tokens, shifted(tokens), micro_batch, 0.0);
  return router_gradient(toy);
}

TEST(RouterBalance, TheCoefficientIsAFactor) {
  for (const BalanceMode mode : {BalanceMode::kMicro, BalanceMode::kSequence, BalanceMode::kGlobal}) {
    ToyOptions options;
    options.balance = mode;
    EXPECT_EQ(balance_only(options, 2, 4).abs().max().item<double>(), 0.0);
    options.coef = 0.1;
    const at::Tensor once = balance_only(options, 2, 4);
    EXPECT_GT(once.norm().item<double>(), 0.0);
    options.coef = 0.2;
    EXPECT_LE(relative_difference(balance_only(options, 2, 4), 2 * once), 1e-6);
  }
}

TEST(RouterBalance, TheGradientIsTheSameAtEveryLayout) {
  ToyOptions options;
  options.coef = 0.1;
  for (const BalanceMode mode : {BalanceMode::kMicro, BalanceMode::kSequence, BalanceMode::kGlobal}) {
    options.balance = mode;
    const at::Tensor reference = balance_only(options, 1, 1);
    for (const int64_t micro_batch : {1, 2}) {
      for (const int64_t micro_batches : {1, 2, 4}) {
        EXPECT_LE(relative_difference(balance_only(options, micro_batch, micro_batch * micro_batches), reference),
                  1e-5);
      }
    }
  }
}

TEST(RouterBalance, TheGradientIsAutogradsOfCoefficientTimesLoss) {
  // Router of the last layer of a one-layer model, by hand: d (coef · E Σ f P) / d W.
  ToyOptions options;
  options.layers = 1;
  options.balance = BalanceMode::kMicro;
  options.coef = 0.3;
  ToyModel toy(options);
  const auto tokens = random_tokens(1, 32, 22);
  toy.accumulate(tokens, shifted(tokens), 1, 0.0);
  const at::Tensor ours = toy.parameter("layers.0.router").grad;

  const std::vector<int32_t> starts(32, 0);
  const MicroBatch batch = make_micro_batch(tokens[0], starts, starts, 1, 32, false, at::kCPU);
  const auto layer = toy.model().make_layer(0, toy.store().table());
  WeightGradQueue queue;
  LayerContext context = batch.context;
  context.rope = toy.model().rope_table(at::kCPU);
  context.weight_grads = &queue;
  at::Tensor normed;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor hidden = toy.parameter("embedding").value.index_select(0, batch.tokens);
    normed = layer->attend_and_route(hidden, context).normed;
  }
  const at::Tensor weight = toy.parameter("layers.0.router").value.clone().requires_grad_();
  const at::Tensor p = at::softmax(at::matmul(normed, weight.t()), -1);
  const at::Tensor chosen = std::get<1>(p.topk(2, -1)).flatten();
  const at::Tensor f = at::bincount(chosen, {}, 8).to(at::kFloat) / 64.0;
  const at::Tensor loss = 0.3 * 8 * (f * p.mean(0)).sum();
  loss.backward();
  EXPECT_LE(relative_difference(ours, weight.grad()), 1e-5);
  EXPECT_NEAR(toy.tracker().losses().item<double>(), loss.item<double>() / 0.3, 1e-5);
}

TEST(RouterBalance, ZLossReachesTheRouter) {
  ToyOptions options;
  ToyModel without(options), with([&] {
    options.z_loss = 0.01;
    return options;
  }());
  const auto tokens = random_tokens(2, 32, 23);
  without.accumulate(tokens, shifted(tokens), 1, 0.0);
  with.accumulate(tokens, shifted(tokens), 1, 0.0);
  EXPECT_EQ(router_gradient(without).abs().max().item<double>(), 0.0);
  EXPECT_GT(router_gradient(with).norm().item<double>(), 0.0);
}

TEST(RouterBalance, BiasFollowsTheLoadAndIsCentred) {
  ToyOptions options;
  options.balance = BalanceMode::kBias;
  options.coef = 0.01;
  ToyModel toy(options);
  const auto tokens = random_tokens(4, 32, 24);
  toy.accumulate(tokens, shifted(tokens), 2);
  const at::Tensor counts = toy.tracker().previous_counts();
  EXPECT_EQ(counts.sum().item<double>(), 4 * 4 * 32 * 2);  // layers · sequences · tokens · k
  const at::Tensor bias = toy.tracker().bias();
  EXPECT_LE(bias.mean(1).abs().max().item<double>(), 1e-8);
  const at::Tensor expected = 0.01 * at::sign(counts.mean(1, true) - counts);
  EXPECT_LE(relative_difference(bias, expected - expected.mean(1, true)), 1e-6);
}

}  // namespace
}  // namespace marrow::test
