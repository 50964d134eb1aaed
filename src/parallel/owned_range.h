// What one rank holds of one Hub tensor: the unit of checkpoints.
#pragma once
#include <ATen/ATen.h>

#include "ops/parameter_spec.h"

namespace marrow {

// Elements [begin, end) of a Hub tensor, counted row-major, with the state that a rank keeps for
// them. The tensors are 1-D views of end - begin elements, on any device, and are written through.
struct OwnedRange {
  const HubTensor* tensor = nullptr;
  int64_t begin = 0, end = 0;
  at::Tensor master;      // [end - begin] fp32
  at::Tensor exp_avg;     // [end - begin] fp32|bf16: first moment, or Muon's momentum; may be undefined
  at::Tensor exp_avg_sq;  // [end - begin] fp32|bf16: undefined for tensors updated by Muon
};

}  // namespace marrow
