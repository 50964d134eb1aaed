// One matrix product per expert, over rows sorted by expert.
#pragma once
#include "ops/expert_rows.h"

namespace marrow {

// out[r] = rows[r] · weight[e]ᵀ for offsets[e-1] ≤ r < offsets[e]. rows [R, K] fp32 or bf16, weight [E, N, K] of the
// same dtype, offsets [E] int32 on the same device → [R, N]. Rows from offsets[E-1] on are zero on the CPU, and not
// written on the GPU. bf16 on the GPU needs K and N divisible by 8. The weight's gradient goes through `queue`.
// Where weight.fp8 is set, each of the three products is of E4M3 values if that is faster (fp8_wins), in blocks of 128
// of what it sums over: the weight's gradient of an expert's rows.
// `input_major`: weight is [E, K, N], and out[r] = rows[r] · weight[e].
at::Tensor grouped_linear(const at::Tensor& rows, const Parameter& weight, const at::Tensor& offsets,
                          WeightGradQueue& queue, bool input_major = false);

// The same where the operators before and after it hand over what they make in fp8.
ExpertRows grouped_linear(const ExpertRows& rows, const Parameter& weight, WeightGradQueue& queue,
                          bool input_major = false);

// grad [E, N, K] fp32: grad[e] += dyᵀ · rows of e's rows, dy [R, N] and rows [R, K]; and of those that
// quantize_expert_rows has turned, [N, P] and [K, P].
void grouped_weight_grad(const at::Tensor& grad, const at::Tensor& dy, const at::Tensor& rows,
                         const at::Tensor& offsets);
void grouped_fp8_weight_grad(const at::Tensor& grad, const Fp8Matrix& dy, const Fp8Matrix& rows,
                             const at::Tensor& offsets);

// The same products in bf16 by libtorch, for GPUs whose own kernels are not here (gpu_support): rows [R, inner] ·
// weight[e], or with `transpose` weight[e]ᵀ; and grad[e] += dyᵀ · rows, rounded to bf16 before it is added.
at::Tensor plain_grouped_product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& offsets,
                                 bool transpose);
void plain_grouped_weight_grad(const at::Tensor& grad, const at::Tensor& dy, const at::Tensor& rows,
                               const at::Tensor& offsets);

}  // namespace marrow
