// Token embedding as two plain functions: the second gets the gradient of what the first returned.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// Rows of weight [V, H] → [T, H] in its dtype, with no autograd history. ids [T] int32 in [0, V):
// the loader has checked them; the CPU checks again.
at::Tensor embedding_forward(const at::Tensor& ids, const Parameter& weight);

// weight.grad[ids[t]] += d_out[t] for all t, if weight.grad is defined. d_out [T, H]. On the CPU
// always in order of t; on the GPU with fp32 atomics unless `deterministic` (then sorted by id).
void embedding_backward(const at::Tensor& ids, const at::Tensor& d_out, const Parameter& weight,
                        bool deterministic = false);

}  // namespace marrow
