// A trainable tensor as operators see it.
#pragma once
#include "ops/pch.h"

namespace marrow {

// `value` is in the working dtype; operators read it and add its gradient into `grad` (fp32, same
// shape; undefined at inference) themselves. Both are views into the flat buffers of a group.
struct Parameter {
  std::string name;  // "layers.3.experts.down"
  at::Tensor value;
  at::Tensor grad;
};

}  // namespace marrow
