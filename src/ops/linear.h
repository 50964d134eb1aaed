// x·Wᵀ + b, with the weight gradient put off.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// → [T, N] for x [T, K] and weight [N, K], same dtype (fp32 or bf16). The backward returns dx at once and pushes the
// task weight.grad += dYᵀ·x (fp32, beta = 1) where weight.grad is defined; bias.grad ([N]) is in the same task. It runs
// only where x requires a gradient. `queue` must outlive the backward. Saves x. Where weight.fp8 is set, each of the
// three products for which fp8 is faster (fp8_wins) is of E4M3 values; the weight's gradient sums over blocks of 128
// rows of x, and x is saved as these.
at::Tensor linear(const at::Tensor& x, const Parameter& weight, WeightGradQueue& queue,
                  const Parameter* bias = nullptr);

// grad [N, K] fp32 += dyᵀ·x for dy [T, N] and x [T, K]; on the GPU bf16 accumulates into fp32 in the product itself.
void accumulate_weight_grad(const at::Tensor& grad, const at::Tensor& dy, const at::Tensor& x);

}  // namespace marrow
