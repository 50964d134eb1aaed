// The causal convolution of a few tokens, a filter a channel, in front of a gated delta rule.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// y[t, c] = silu(Σ_j weight[c, j] · x[t − K + 1 + j, c]), K from 1 to 4. Rows before a segment are those of its halo,
// or zeros. Segments as in gated_delta_rule. The backward adds into weight.grad, if defined, in a fixed order; it runs
// only where x or halo requires a gradient. Saves x and halo.
at::Tensor short_convolution(const at::Tensor& x,           // [T, C] fp32 or bf16
                             const Parameter& weight,       // [C, K] or [C, 1, K], same dtype
                             const at::Tensor& starts,      // [segments + 1] int32
                             const at::Tensor& halo = {});  // [segments, K − 1, C], or none: zeros

}  // namespace marrow
