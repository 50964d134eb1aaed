// Attention on the CPU, for documents and windows alike.
#pragma once
#include "ops/pch.h"

namespace marrow {

struct CpuAttention {
  std::vector<int64_t> segments;  // cumulative token offsets of what attends among itself
  int64_t window = 0;             // 0 = no limit
  double scale = 1.0;
};

// q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] → out [T, Hq, Dv] in q's dtype, and log-sum-exp
// [Hkv, T, Hq / Hkv] fp32.
std::pair<at::Tensor, at::Tensor> attention_forward_cpu(const CpuAttention& attention, const at::Tensor& q,
                                                        const at::Tensor& k, const at::Tensor& v);

// {dq, dk, dv} from d_out and what the forward read and wrote.
std::array<at::Tensor, 3> attention_backward_cpu(const CpuAttention& attention, const at::Tensor& q,
                                                 const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                                 const at::Tensor& lse, const at::Tensor& d_out);

}  // namespace marrow
