// The gated activation of feed-forward layers and experts.
#pragma once
#include "ops/expert_rows.h"

namespace marrow {

// silu(gate) · up · row_weight → [R, I], R may be 0. gate_up [R, 2I] fp32 or bf16, gate in the
// first I columns; row_weight [R] fp32, or undefined for 1. Saves its inputs alone. Gradients:
// gate_up's in its dtype, row_weight's in fp32.
// offsets, of experts' rows: those behind its last entry, and their gradients, hold anything.
at::Tensor swiglu(const at::Tensor& gate_up, const at::Tensor& row_weight = {}, const at::Tensor& offsets = {});

// The same of experts' rows, which the product with `reader` [E, N, I] reads: hands over what it makes in fp8.
ExpertRows swiglu(const ExpertRows& gate_up, const at::Tensor& row_weight, const Parameter& reader);

// GPT-OSS' variant: gate in the even columns of gate_up, up in the odd ones; g = min(gate, limit), u = up between
// -limit and limit; g · sigmoid(alpha · g) · (u + 1) · row_weight → [R, I]. Computes in fp32; saves its inputs alone.
// offsets as in swiglu.
at::Tensor clamped_swiglu(const at::Tensor& gate_up, const at::Tensor& row_weight, double alpha, double limit,
                          const at::Tensor& offsets = {});

}  // namespace marrow
