// Attention in which each query row sees a range of keys: documents, windows and rectangular blocks alike.
#pragma once
#include "ops/pch.h"

namespace marrow {

// Query row t sees keys [first_key[t], end_key[t]), which may be none. Both ascend within a segment
// of queries, and segments see different keys.
struct RowAttention {
  std::vector<int64_t> segments;  // cumulative query row offsets
  std::vector<int64_t> first_key, end_key;
  double scale = 1.0;
};

// q [T, Hq, D], k [K, Hkv, D], v [K, Hkv, Dv] → out [T, Hq, Dv] in q's dtype, and log-sum-exp
// [Hkv, T, Hq / Hkv] fp32; 0 and −∞ for a row that sees no key. Tensors on a GPU go by way of the host, for tests.
std::pair<at::Tensor, at::Tensor> attention_rows_forward(const RowAttention& attention, const at::Tensor& q,
                                                         const at::Tensor& k, const at::Tensor& v);

// {dq, dk, dv} in q's dtype from d_out and from out and log-sum-exp over all keys that a row sees:
// those of the forward, or of a merge of several forwards over other keys.
std::array<at::Tensor, 3> attention_rows_backward(const RowAttention& attention, const at::Tensor& q,
                                                  const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                                  const at::Tensor& lse, const at::Tensor& d_out);

}  // namespace marrow
