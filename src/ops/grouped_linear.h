// One matrix product per expert, over rows sorted by expert, and a bias per expert.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// out[r] = rows[r] · weight[e]ᵀ for offsets[e-1] ≤ r < offsets[e]. rows [R, K] fp32 or bf16, weight [E, N, K] of the
// same dtype, offsets [E] int32 on the same device → [R, N]. Rows from offsets[E-1] on are zero on the CPU, and not
// written on the GPU. bf16 on the GPU needs K and N divisible by 8. The weight's gradient goes through `queue`.
// `input_major`: weight is [E, K, N], and out[r] = rows[r] · weight[e].
at::Tensor grouped_linear(const at::Tensor& rows, const Parameter& weight, const at::Tensor& offsets,
                          WeightGradQueue& queue, bool input_major = false);

// rows[r] += row_weights[r] · bias[e], in place: the rows are an operator's output that no backward reads. rows [R, N]
// fp32 or bf16, bias [E, N] of the same dtype, row_weights [R] fp32, or undefined for 1. Rows from offsets[E-1] on are
// undefined, and reach no gradient of bias, which goes through `queue`; row_weights' gradient is fp32.
at::Tensor add_expert_bias_(const at::Tensor& rows, const Parameter& bias, const at::Tensor& offsets,
                            const at::Tensor& row_weights, WeightGradQueue& queue);

}  // namespace marrow
