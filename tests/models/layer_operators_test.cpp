#include "models/layer_operators.h"

#include <ATen/record_function.h>

#include "models/config_changes.h"
#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

Parameter weight_of(const ParameterSpec& spec, bool fp8) {
  Parameter weight = make_parameter(random_tensor(spec.shape, at::kBFloat16, at::kCPU, 1, 0.1), spec.name);
  if (fp8 && spec.rule == UpdateRule::kMuon) weight.fp8 = std::make_shared<Fp8Weight>();
  return weight;
}

int64_t operators_while(const std::function<void()>& run) {
  static int64_t count = 0;
  count = 0;
  const at::CallbackHandle handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction&) {
                                   ++count;
                                   return std::unique_ptr<at::ObserverContext>();
                                 }).scopes({at::RecordScope::FUNCTION}));
  run();
  at::removeCallback(handle);
  return count;
}

struct Outcome {
  std::vector<Tensor> gradients;  // of x, then of the weights
  int64_t made_again = 0;         // operators that ran for it
};

// Forward and backward of `apply`, which reads x [T, H] and the weights of `specs`.
Outcome run(const std::vector<ParameterSpec>& specs, bool fp8, bool cheap,
            const std::function<Tensor(const Tensor&, const ParameterTable&, const LayerContext&)>& apply) {
  ParameterTable table;
  for (const ParameterSpec& spec : specs) table.emplace(spec.name, weight_of(spec, fp8));
  WeightGradQueue queue;
  RecomputeList list;
  LayerContext context;
  context.weight_grads = &queue;
  context.recompute = cheap ? &list : nullptr;
  const Tensor x = with_grad(random_tensor({12, 64}, at::kBFloat16, at::kCPU, 2));
  const Tensor out = apply(x, table, context);
  list.release();
  Outcome outcome;
  outcome.made_again = operators_while([&] { list.restore(); });
  out.backward(at::ones_like(out));
  queue.run_all();
  outcome.gradients.push_back(x.grad());
  for (const auto& [name, weight] : table) outcome.gradients.push_back(weight.grad);
  return outcome;
}

void expect_made_again_in_bf16_alone(
    const std::vector<ParameterSpec>& specs,
    const std::function<Tensor(const Tensor&, const ParameterTable&, const LayerContext&)>& apply) {
  for (const bool fp8 : {false, true}) {
    const Outcome kept = run(specs, fp8, false, apply), cheap = run(specs, fp8, true, apply);
    EXPECT_EQ(cheap.made_again > 0, !fp8);
    ASSERT_EQ(kept.gradients.size(), cheap.gradients.size());
    for (size_t i = 0; i < kept.gradients.size(); ++i) {
      EXPECT_TRUE(tensors_identical(cheap.gradients[i], kept.gradients[i])) << (fp8 ? "fp8 " : "bf16 ") << i;
      EXPECT_GT(kept.gradients[i].abs().max().item<double>(), 0);
    }
  }
}

// What a product reads in fp8 alone, nobody reads again.
TEST(LayerOperators, ADenseActivationThatIsKeptInFp8IsNotMadeAgain) {
  ParameterSpec gate_up, down;
  gate_up.name = "gate_up", gate_up.shape = {96, 64};
  down.name = "down", down.shape = {64, 48};
  expect_made_again_in_bf16_alone({gate_up, down}, [](const Tensor& x, const auto& table, const auto& context) {
    return swiglu_mlp(context, x, table.at("gate_up"), table.at("down"));
  });
}

TEST(LayerOperators, NorIsThatOfGptOssExperts) {
  Json config = test::published("gpt-oss-20b");
  for (const auto& [key, value] : {std::pair("hidden_size", "64"),
                                   {"intermediate_size", "48"},
                                   {"num_hidden_layers", "1"},
                                   {"layer_types", "[\"full_attention\"]"},
                                   {"num_local_experts", "4"}}) {
    config = test::changed(config, key, value);
  }
  const auto model = open_model(config);
  std::vector<ParameterSpec> experts;
  for (const ParameterSpec& spec : model->layer_specs(0)) {
    if (spec.expert) experts.push_back(spec);
  }
  expect_made_again_in_bf16_alone(experts, [&](const Tensor& x, const auto& of_experts, const auto& context) {
    ParameterTable table = of_experts;
    for (const ParameterSpec& spec : model->layer_specs(0)) {
      if (!spec.expert) table.emplace(spec.name, weight_of(spec, false));
    }
    const ExpertRows rows{x, at::tensor({3, 3, 8, 12}, at::kInt)};
    const Tensor weights = at::linspace(0.1, 1, 12, at::kFloat).set_requires_grad(true);
    return model->make_layer(0, table)->run_experts(rows, weights, context).value;
  });
}

// A norm has several readers.
TEST(LayerOperators, WhatHasNoSingleReaderIsMadeAgain) {
  int made = 0;
  RecomputeList list;
  LayerContext context;
  context.recompute = &list;
  const auto make = [&] {
    ++made;
    return at::ones({4, 64}, at::kBFloat16);
  };
  const Tensor first = cheap(context, make);
  list.release();
  list.restore();
  EXPECT_EQ(made, 2);
  EXPECT_TRUE(tensors_identical(first, at::ones({4, 64}, at::kBFloat16)));
  ParameterSpec reader;
  reader.shape = {64, 64};
  const Parameter weight = weight_of(reader, true);
  Parameter frozen = weight;  // its product keeps nothing, and the values may be another's
  frozen.grad = Tensor();
  cheap(context, make, frozen);
  {
    const at::NoGradGuard no_grad;
    cheap(context, make, weight);
  }
  cheap(context, make, weight);
  list.restore();
  EXPECT_EQ(made, 2 + 3 + 2);
}

}  // namespace
}  // namespace marrow
