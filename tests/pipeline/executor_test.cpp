// The whole model in one process: gradients against finite differences and other layouts.
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include "ops/fp8_quantize.h"
#include "toy_model.h"

namespace marrow::test {
namespace {

TEST(Executor, ToyHasTheDocumentedNumberOfParameters) {
  ToyModel four({});
  EXPECT_EQ(four.store().elements(), 412352);
  ToyOptions eight;
  eight.layers = 8;
  EXPECT_EQ(ToyModel(eight).store().elements(), 759104);
}

TEST(Executor, GradientAgreesWithFiniteDifferences) {
  ToyOptions options;
  options.layers = 2;
  options.top_k = 8;  // every expert: no route can flip between the two points
  ToyModel toy(options);
  const auto tokens = random_tokens(2, 16, 5);
  const auto targets = shifted(tokens);
  toy.accumulate(tokens, targets, 2);
  const at::Tensor gradient = toy.all_gradients().clone();
  ASSERT_GT(gradient.norm().item<double>(), 1e-3);

  // Along the gradient itself the loss must rise by step · |g|.
  const double step = 2e-3;
  const at::Tensor direction = gradient / gradient.norm();
  const auto move = [&](double amount) {
    int64_t offset = 0;
    for (FlatGroup& group : toy.store().groups()) {
      group.master.add_(direction.narrow(0, offset, group.elements()), amount);
      offset += group.elements();
    }
  };
  move(step);
  const double above = toy.accumulate(tokens, targets, 2);
  move(-2 * step);
  const double below = toy.accumulate(tokens, targets, 2);
  const double slope = (above - below) / (2 * step);
  EXPECT_NEAR(slope / gradient.norm().item<double>(), 1.0, 0.01);
}

TEST(Executor, MicroBatchSizeDoesNotChangeLossOrGradient) {
  const auto tokens = random_tokens(8, 32, 9);
  const auto targets = shifted(tokens);
  ToyModel reference({});
  const double loss = reference.accumulate(tokens, targets, 8);
  for (const int64_t micro_batch : {1, 2, 4}) {
    ToyModel toy({});
    EXPECT_NEAR(toy.accumulate(tokens, targets, micro_batch), loss, 1e-5 * loss);
    EXPECT_LE(relative_difference(toy.all_gradients(), reference.all_gradients()), 1e-5);
  }
}

// Copies in fp8 are made once for all micro-batches, and anew for other values: else the changed model's loss would be
// that of the old weights.
TEST(Executor, Fp8CopiesAreOfTheValuesThatAre) {
  const auto tokens = random_tokens(4, 32, 3);
  const auto targets = shifted(tokens);
  for (const bool by_layer : {false, true}) {
    ToyOptions options;
    options.dtype = at::kBFloat16;
    options.fp8 = true;
    options.by_layer = by_layer;
    ToyModel toy(options);
    const double before = toy.accumulate(tokens, targets, 1);
    const Parameter& down = toy.parameter("layers.1.experts.down");
    ASSERT_NE(down.fp8, nullptr);
    EXPECT_EQ(toy.parameter("layers.1.router").fp8, nullptr);
    EXPECT_EQ(toy.parameter("layers.1.q_norm").fp8, nullptr);
    EXPECT_EQ(toy.parameter("embedding").fp8, nullptr);
    if (!by_layer) {
      const void* copy = down.fp8->of(down.value).rows.data.data_ptr();
      toy.accumulate(tokens, targets, 1);
      EXPECT_EQ(down.fp8->of(down.value).rows.data.data_ptr(), copy);
    }
    ToyOptions other = options;
    other.seed = 2;
    ToyModel fresh(other);
    const double expected = fresh.accumulate(tokens, targets, 1);
    for (size_t g = 0; g < toy.store().groups().size();
         ++g) {  // as an optimizer step: masters, working copies, gathers
      FlatGroup &ours = toy.store().groups()[g], &theirs = fresh.store().groups()[g];
      ours.master.copy_(theirs.master);
      if (ours.rounded.defined()) ours.rounded.copy_(ours.master);
      if (!by_layer) toy.store().start_gather(ours);
    }
    EXPECT_NE(before, expected);
    if (by_layer) {
      EXPECT_EQ(toy.accumulate(tokens, targets, 1), expected);
      continue;
    }
    toy.zero_gradients();
    fresh.zero_gradients();
    EXPECT_EQ(toy.accumulate(tokens, targets, 1), expected);
    fresh.accumulate(tokens, targets, 1);
    EXPECT_TRUE(toy.all_gradients().equal(fresh.all_gradients()));
  }
}

// Each product with a weight is 3.7 % off (tests/ops), independently: a gradient has about 12 of them in its way.
TEST(Executor, Fp8GradientsAreNearThoseOfFp32) {
  const auto tokens = random_tokens(4, 32, 3);
  const auto targets = shifted(tokens);
  ToyOptions options;
  options.top_k = 8;  // no route can flip
  ToyModel exact(options);
  options.dtype = at::kBFloat16;
  ToyModel bf16(options);
  options.fp8 = true;
  ToyModel fp8(options);
  const double loss = exact.accumulate(tokens, targets, 1);
  bf16.accumulate(tokens, targets, 1);
  EXPECT_NEAR(fp8.accumulate(tokens, targets, 1), loss, 5e-3 * loss);
  const at::Tensor gradient = exact.all_gradients();
  const double rough = relative_difference(fp8.all_gradients(), gradient);
  EXPECT_LE(rough, 0.037 * std::sqrt(12.0));
  EXPECT_GT(rough, 2 * relative_difference(bf16.all_gradients(), gradient));
}

// Steps on the gradient; both modes of recomputation against none, after one step and after three.
TEST(Executor, RecomputationGivesTheSameBits) {
  const auto tokens = random_tokens(4, 32, 3);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const BalanceMode mode : {BalanceMode::kMicro, BalanceMode::kSequence}) {
      ToyOptions options;
      options.balance = mode;
      options.coef = 0.1;
      options.dtype = dtype;
      ToyModel kept(options);
      options.recompute = true;
      ToyModel layers(options);
      options.recompute = false;
      options.recompute_cheap = true;
      ToyModel cheap(options);
      for (int step = 1; step <= 3; ++step) {
        SCOPED_TRACE(fmt::format("{} step {}", c10::toString(dtype), step));
        const double loss = kept.accumulate(tokens, shifted(tokens), 2);
        for (ToyModel* recomputed : {&layers, &cheap}) {
          EXPECT_EQ(recomputed->accumulate(tokens, shifted(tokens), 2), loss);
          EXPECT_TRUE(at::equal(kept.all_gradients(), recomputed->all_gradients()));
          EXPECT_TRUE(at::equal(kept.tracker().losses(), recomputed->tracker().losses()));
        }
        for (ToyModel* toy : {&kept, &layers, &cheap}) {
          for (FlatGroup& group : toy->store().groups()) group.master.sub_(group.grad, 0.1);
          toy->store().copy_masters_to_working();
          toy->zero_gradients();
        }
      }
    }
  }
}

// Tensors' memory while it is installed, of which it counts the most at a time.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : system_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, 1); }
  ~CountingAllocator() override { c10::SetCPUAllocator(system_, 1); }
  c10::DataPtr allocate(size_t bytes) override {
    now += static_cast<int64_t>(bytes);
    most = std::max(most, now);
    auto* block = new Block{system_->allocate(bytes), static_cast<int64_t>(bytes)};
    return {block->memory.get(), block, [](void* one) { free_block(one); }, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  static inline int64_t now = 0, most = 0;  // no thread but the test's allocates

 private:
  struct Block {
    c10::DataPtr memory;
    int64_t bytes;
  };
  static void free_block(void* one) {
    now -= static_cast<Block*>(one)->bytes;
    delete static_cast<Block*>(one);
  }
  c10::Allocator* system_;
};

TEST(Executor, CheapActivationsAreNotKept) {
  const int64_t sequences = 2, length = 64, layers = 4;
  const auto tokens = random_tokens(sequences, length, 3);
  const auto peak = [&](bool cheap) {
    ToyOptions options;
    options.recompute_cheap = cheap;
    ToyModel toy(options);
    toy.accumulate(tokens, shifted(tokens), sequences);
    CountingAllocator counting;
    CountingAllocator::now = CountingAllocator::most = 0;
    toy.accumulate(tokens, shifted(tokens), sequences);
    return CountingAllocator::most;
  };
  ToyModel toy({});
  const ActivationBytes each = toy.model().activation_bytes(0, 4);
  // A layer's own come back for its backward.
  const int64_t dropped = sequences * length * (each.token_cheap + 2 * each.expert_row_cheap);
  const int64_t fewer = peak(false) - peak(true);
  EXPECT_GE(fewer, (layers - 1) * dropped);
  EXPECT_LE(fewer, layers * dropped);
}

TEST(Executor, WithLayerShardsWholeGradientsOfOneLayerStay) {
  const auto tokens = random_tokens(4, 32, 3);
  ToyModel whole({});
  whole.accumulate(tokens, shifted(tokens), 2);
  ToyOptions options;
  options.by_layer = true;
  ToyModel by_layer(options);
  by_layer.accumulate(tokens, shifted(tokens), 2);
  int64_t open = 0;
  for (const FlatGroup& group : by_layer.store().groups()) open += group.grad.storage().nbytes() > 0 ? 1 : 0;
  EXPECT_EQ(open, 1);  // the embedding's, which came last
  by_layer.store().sum_replicas();
  std::vector<at::Tensor> sums;
  for (const FlatGroup& group : by_layer.store().groups()) sums.push_back(group.own_grad);
  EXPECT_LE(relative_difference(at::cat(sums), whole.all_gradients()), 1e-6);
}

TEST(Executor, TiedEmbeddingsGetBothGradients) {
  ToyOptions options;
  options.tied = true;
  ToyModel toy(options);
  const auto tokens = random_tokens(1, 8, 4, 16);  // ids below 16 are read
  toy.accumulate(tokens, shifted(tokens), 1);
  const at::Tensor grad = toy.parameter("embedding").grad;
  EXPECT_FALSE(toy.store().table().contains("head"));
  EXPECT_GT(grad.narrow(0, 16, 496).abs().sum().item<double>(), 0.0);  // through the head alone
}

// Targets count as tokens, whatever the document or micro-batch they stand in.
TEST(Executor, EveryTargetWeighsTheSame) {
  auto tokens = random_tokens(2, 101, 6);
  auto targets = shifted(tokens);
  for (size_t i = 10; i < 101; ++i) targets[0][i] = -1;  // 10 targets
  targets[1][100] = -1;                                  // 100 targets
  ToyModel together({}), apart({});
  const double loss = together.accumulate(tokens, targets, 2);
  EXPECT_NEAR(apart.accumulate(tokens, targets, 1), loss, 1e-5 * loss);
  EXPECT_LE(relative_difference(apart.all_gradients(), together.all_gradients()), 1e-5);
}

TEST(Executor, AMaskedBatchTrainsNothingAndStaysFinite) {
  const auto tokens = random_tokens(2, 16, 8);
  const std::vector<std::vector<int32_t>> masked(2, std::vector<int32_t>(16, -1));
  ToyModel toy({});
  EXPECT_EQ(toy.accumulate(tokens, masked, 1), 0.0);
  EXPECT_EQ(toy.all_gradients().abs().max().item<double>(), 0.0);
}

TEST(Executor, ASingleTokenTrains) {
  ToyModel toy({});
  const double loss = toy.accumulate({{5}}, {{6}}, 1);
  EXPECT_NEAR(loss, std::log(512.0), 0.5);
  EXPECT_TRUE(at::isfinite(toy.all_gradients()).all().item<bool>());
}

// Equal logits choose the lowest ids: all tokens on experts 0 and 1, the other six are empty.
TEST(Executor, SkewedRoutingTrainsOn) {
  for (const bool recompute : {false, true}) {
    ToyOptions options;
    options.recompute = recompute;
    ToyModel toy(options);
    const auto tokens = random_tokens(2, 32, 33);
    const auto targets = shifted(tokens);
    double first = 0, last = 0;
    for (int step = 0; step < 20; ++step) {
      for (int layer = 0; layer < 4; ++layer) {
        toy.parameter(fmt::format("layers.{}.router", layer)).value.zero_();
      }
      toy.zero_gradients();
      last = toy.accumulate(tokens, targets, 1);
      if (step == 0) first = last;
      const at::Tensor counts = toy.tracker().previous_counts();  // 2 · 32 tokens on each of two
      EXPECT_TRUE(counts.narrow(1, 0, 2).eq(64).all().item<bool>());
      EXPECT_TRUE(counts.narrow(1, 2, 6).eq(0).all().item<bool>());
      for (const char* name : {"layers.2.experts.gate_up", "layers.2.experts.down"}) {
        const at::Tensor grad = toy.parameter(name).grad;
        EXPECT_GT(grad.narrow(0, 0, 2).abs().max().item<double>(), 0.0);
        EXPECT_EQ(grad.narrow(0, 2, 6).abs().max().item<double>(), 0.0);
      }
      for (FlatGroup& group : toy.store().groups()) group.master.sub_(group.grad, 0.1);
    }
    EXPECT_LT(last, first);
  }
}

// Expert blocks of NaN are freed before the step: nothing may read memory that it did not write.
TEST(Executor, NoResultDependsOnUninitialisedMemory) {
  // Large blocks too must come back from the allocator with their old bytes in them.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const auto tokens = random_tokens(2, 32, 11);
  ToyOptions options;
  options.top_k = 1;
  ToyModel clean(options), poisoned(options);
  for (ToyModel* toy : {&clean, &poisoned}) {  // one expert takes all: seven are empty
    for (int layer = 0; layer < 4; ++layer) {
      toy->parameter(fmt::format("layers.{}.router", layer)).value.zero_();
    }
  }
  clean.accumulate(tokens, shifted(tokens), 1);
  for (const int64_t n : {8 * 96 * 64, 8 * 64 * 48, 32 * 64, 64 * 96, 32 * 48, 32 * 512}) {
    std::vector<at::Tensor> blocks;
    for (int i = 0; i < 8; ++i) blocks.push_back(at::full({n}, std::nan("")));
  }
  ASSERT_TRUE(at::isnan(at::empty({8 * 96 * 64})).any().item<bool>());
  poisoned.accumulate(tokens, shifted(tokens), 1);
  EXPECT_TRUE(at::equal(poisoned.all_gradients(), clean.all_gradients()));
  const at::Tensor unused = poisoned.parameter("layers.0.experts.down").grad.narrow(0, 1, 7);
  EXPECT_EQ(unused.abs().max().item<double>(), 0.0);
}

}  // namespace
}  // namespace marrow::test
