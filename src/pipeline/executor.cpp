#include "pipeline/executor.h"

#include "ops/embedding.h"
#include "ops/linear_cross_entropy.h"

namespace marrow {

namespace {

// Runs one layer's work; an error from it says which layer.
template <typename Work>
at::Tensor in_layer(size_t layer, const char* direction, Work work) {
  try {
    return work();
  } catch (Error& error) {
    error.add_who(fmt::format("layer {} {}", layer, direction));
    throw;
  }
}

}  // namespace

Executor::Executor(const MoeModel& model, const ParameterTable& parameters, BalanceTracker* tracker, at::Device device,
                   const Options& options)
    : model_(&model), parameters_(&parameters), tracker_(tracker), options_(options) {
  for (int64_t layer = 0; layer < model.shape().layers; ++layer) {
    layers_.push_back(model.make_layer(layer, parameters, device));
  }
}

const Parameter& Executor::head() const {
  return parameters_->at(model_->shape().tied_embeddings ? "embedding" : "head");
}

void Executor::prepare(MicroBatch& batch) {
  batch.context.weight_grads = &weight_grads_;
  batch.context.forced_routing = options_.forced_routing;
  batch.context.deterministic = options_.deterministic;
}

void Executor::train(MicroBatch batch, double gradient_scale, const at::Tensor& loss_sum) {
  prepare(batch);
  const Parameter& embedding = parameters_->at("embedding");
  at::Tensor hidden = embedding_forward(batch.tokens, embedding);
  std::vector<LayerPass> passes;
  passes.reserve(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    passes.emplace_back(*layers_[i], static_cast<int64_t>(i), tracker_, options_.recompute_layers);
    hidden = in_layer(i, "forward", [&] { return passes[i].forward(hidden, batch.context); });
  }

  StageGraph norm;
  hidden = norm.forward(
      {hidden}, [&](const auto& in) { return std::vector<at::Tensor>{model_->final_norm(in[0], *parameters_)}; })[0];
  LinearCrossEntropy head_loss =
      linear_cross_entropy(hidden, head(), batch.targets, gradient_scale, /*with_gradient=*/true);
  loss_sum.add_(head_loss.loss_sum);
  hidden.reset();

  at::Tensor gradient = norm.backward({std::move(head_loss.d_x)})[0];
  while (!passes.empty()) {
    gradient = in_layer(passes.size() - 1, "backward", [&] { return passes.back().backward(gradient); });
    passes.pop_back();
    weight_grads_.run_all();
  }
  embedding_backward(batch.tokens, gradient, embedding, options_.deterministic);
}

at::Tensor Executor::hidden_states(MicroBatch batch) {
  const at::NoGradGuard no_grad;
  prepare(batch);
  at::Tensor hidden = embedding_forward(batch.tokens, parameters_->at("embedding"));
  for (size_t i = 0; i < layers_.size(); ++i) {
    hidden = LayerPass(*layers_[i], static_cast<int64_t>(i), nullptr, false).forward(hidden, batch.context);
  }
  return model_->final_norm(hidden, *parameters_);
}

at::Tensor Executor::evaluate(MicroBatch batch) {
  const at::Tensor targets = batch.targets;
  return linear_cross_entropy(hidden_states(std::move(batch)), head(), targets, 1.0,
                              /*with_gradient=*/false)
      .loss_sum;
}

at::Tensor Executor::logits(const at::Tensor& hidden) const {
  return at::matmul(hidden, head().value.t()).to(at::kFloat);
}

}  // namespace marrow
