// RMSNorm, alone and after a residual addition.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// y = x / sqrt(mean(x²) + eps) · (weight + offset) per row, statistics and sum in fp32. x [T, H] fp32 or bf16, weight
// [H] of the same dtype; offset 1 for models that store how far a factor is from 1. The backward adds into weight.grad,
// if defined, in a fixed order; it runs only where x requires a gradient. Saves x.
at::Tensor rms_norm(const at::Tensor& x,  // [T, H]
                    const Parameter& weight, double eps, double offset = 0);

// (sum, normed): sum = x + residual, rounded to the working dtype, normed = rms_norm(sum). One
// autograd node; x and residual get the same gradient. Saves sum.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,         // [T, H]
                                               const at::Tensor& residual,  // [T, H]
                                               const Parameter& weight, double eps, double offset = 0);

}  // namespace marrow
