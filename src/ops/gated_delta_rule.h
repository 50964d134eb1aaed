// The gated delta rule: attention whose past is one matrix a head, which decays, and where a key's old value gives way
// to its new one (Gated Delta Networks, arXiv 2412.06464; equation 10, computed by chunks as in section 3.3).
#pragma once
#include "ops/pch.h"

namespace marrow {

struct GatedDeltaRule {
  at::Tensor out;    // [T, Hv, Dv]
  at::Tensor state;  // [segments, Hv, Dk, Dv] fp32, after each segment
};

// With k and q of length 1 (x / √(x·x + 1e-6)), and S the paper's state transposed, [Dk, Dv]:
//   S_t = e^g_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ       out_t = S_tᵀ q_t / √Dk
// Value heads h·Hv/Hk … share query and key head h. Every segment [starts[i], starts[i + 1]) begins with its own
// initial state; starts[0] = 0, the last is T, none descends (checked on the CPU: a GPU's offsets stay on the GPU).
// State is linear in v and the initial state: k, g, β of a segment with v = 0 and initial = I give its transition.
// q, k and v may be column ranges of a wider matrix: split it by split_with_sizes, whose backward is one copy.
// On a GPU Dk and Dv are multiples of 8 up to 128. Gradients of both outputs count. Saves the inputs alone: the
// backward computes the chunks' states again. Equal to the bit when repeated.
GatedDeltaRule gated_delta_rule(const at::Tensor& q,              // [T, Hk, Dk] fp32 or bf16
                                const at::Tensor& k,              // [T, Hk, Dk]
                                const at::Tensor& v,              // [T, Hv, Dv]
                                const at::Tensor& g,              // [T, Hv] fp32, log of the decay, at most 0
                                const at::Tensor& beta,           // [T, Hv] fp32
                                const at::Tensor& starts,         // [segments + 1] int32
                                const at::Tensor& initial = {});  // [segments, Hv, Dk, Dv] fp32, or none: zeros

}  // namespace marrow
