// A bias per expert, on rows sorted by expert.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// rows[r] += row_weights[r] · bias[e], in place: the rows are an operator's output that no backward reads. rows [R, N]
// fp32 or bf16, bias [E, N] of the same dtype, row_weights [R] fp32, or undefined for 1. Rows from offsets[E-1] on are
// undefined, and reach no gradient of bias, which goes through `queue`; row_weights' gradient is fp32.
at::Tensor add_expert_bias_(const at::Tensor& rows, const Parameter& bias, const at::Tensor& offsets,
                            const at::Tensor& row_weights, WeightGradQueue& queue);

}  // namespace marrow
