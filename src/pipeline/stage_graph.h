// An autograd graph of its own for a piece of the model, so that a scheduler decides when its backward runs.
#pragma once
#include "ops/pch.h"

namespace marrow {

class StageGraph {
 public:
  // Calls `body` on leaves that stand for `inputs` and keeps the graph that its outputs carry; returns them cut off
  // from it. Inputs and outputs may be undefined; they then have no gradient.
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& body);

  // Gradients of the inputs from those of the outputs (undefined: zero), and frees the graph.
  // Gradients of parameters are added where the operators say.
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& output_gradients);

 private:
  std::vector<at::Tensor> leaves_, outputs_;
};

}  // namespace marrow
