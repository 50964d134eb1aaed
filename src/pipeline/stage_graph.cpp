#include "pipeline/stage_graph.h"

#include <torch/csrc/autograd/autograd.h>

namespace marrow {

std::vector<at::Tensor> StageGraph::forward(
    const std::vector<at::Tensor>& inputs,
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& body) {
  const bool recording = at::GradMode::is_enabled();
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.defined() ? input.detach() : at::Tensor());
    if (input.defined() && recording) leaves.back().requires_grad_();
  }
  std::vector<at::Tensor> outputs = body(leaves);
  std::vector<at::Tensor> cut;
  for (const at::Tensor& output : outputs) {
    cut.push_back(output.defined() ? output.detach() : at::Tensor());
  }
  if (recording) {
    leaves_ = std::move(leaves);
    outputs_ = std::move(outputs);
  }
  return cut;
}

std::vector<at::Tensor> StageGraph::backward(const std::vector<at::Tensor>& output_gradients) {
  torch::autograd::variable_list roots, gradients;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (!output_gradients[i].defined()) continue;
    roots.push_back(outputs_[i]);
    gradients.push_back(output_gradients[i]);
  }
  torch::autograd::backward(roots, gradients);
  std::vector<at::Tensor> input_gradients;
  for (at::Tensor& leaf : leaves_) {
    input_gradients.push_back(leaf.defined() ? leaf.grad() : at::Tensor());
  }
  leaves_.clear();
  outputs_.clear();
  return input_gradients;
}

}  // namespace marrow
