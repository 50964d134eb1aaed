// A trainable tensor as operators see it.
#pragma once
#include "ops/pch.h"

namespace marrow {

// `value` is in the working dtype and has no autograd history of its own: operators read it and add
// its gradient into `grad` (fp32, same shape, undefined at inference) themselves. Both are views
// into the flat buffers of the parameter's group.
struct Parameter {
  std::string name;  // "layers.3.experts.down"
  at::Tensor value;
  at::Tensor grad;
};

}  // namespace marrow
