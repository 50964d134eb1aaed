// CPU kernels of attention.cpp, for documents and windows alike.
#pragma once
#include "ops/pch.h"

namespace marrow {

struct CpuAttention {
  std::vector<int64_t> segments;  // cumulative token offsets of what attends among itself
  int64_t window = 0;             // 0 = no limit
  double scale = 1.0;
};

// Strided q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] → contiguous out [T, Hq, Dv] and log-sum-exp
// [T, Hq] fp32.
void attention_forward_cpu(const CpuAttention& attention, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse);

// Contiguous dq, dk, dv from d_out (contiguous) and what the forward read and wrote.
void attention_backward_cpu(const CpuAttention& attention, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                            const at::Tensor& d_out, const at::Tensor& dq, const at::Tensor& dk,
                            const at::Tensor& dv);

}  // namespace marrow
