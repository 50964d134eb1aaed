// A trainable tensor as operators see it, and weight gradients put off until the schedule has room for them.
#pragma once
#include "ops/pch.h"

namespace marrow {

class Fp8Weight;  // fp8_quantize.h

// `value` is in the working dtype; operators read it and add its gradient into `grad` (fp32, same
// shape; undefined at inference) themselves. Both are views into the flat buffers of a group.
struct Parameter {
  std::string name;  // "layers.3.experts.down"
  at::Tensor value;
  at::Tensor grad;
  std::shared_ptr<Fp8Weight> fp8 = nullptr;  // of a linear or grouped map whose products are in fp8
};

// The backward of linear, grouped_linear, router and add_expert_bias_ pushes the addition of its weight's gradient
// here; `run_all` performs them in the order of pushing (so sums do not depend on when). A task owns the tensors that
// it reads.
class WeightGradQueue {
 public:
  void push(std::function<void()> task) { tasks_.push_back(std::move(task)); }
  void run_all() {
    for (auto& task : tasks_) {
      task();
      task = nullptr;  // frees its tensors before the next one allocates
    }
    tasks_.clear();
  }
  bool empty() const { return tasks_.empty(); }

 private:
  std::vector<std::function<void()>> tasks_;
};

}  // namespace marrow
