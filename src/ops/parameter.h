// A trainable tensor as operators see it.
#pragma once
#include "ops/pch.h"

namespace marrow {

// `value` is a leaf in the working dtype whose .grad is preset to `grad` (fp32, same shape; undefined
// at inference), so plain ATen code on it accumulates there. Operators of src/ops read the value and
// add its gradient into `grad` themselves. Both are views into the flat buffers of a group.
struct Parameter {
  std::string name;  // "layers.3.experts.down"
  at::Tensor value;
  at::Tensor grad;
};

}  // namespace marrow
