// What computes attention: blocks of bf16 on the GPU (some queries of every sequence against some keys of it), and else
// rows that each see a range of keys: documents, windows and rectangular blocks alike.
#pragma once
#include "ops/pch.h"

namespace marrow {

// Query row t sees keys [first_key[t], end_key[t]), or none. Both ascend within a segment; segments share no keys.
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

// A logit without value joins each row's softmax. sinks [heads…], out [rows…, heads…, Dv] and lse [rows…, heads…] fp32,
// all of the same heads; out and lse become those with the sinks, and a flash backward with them is exact.
void merge_sinks(const at::Tensor& sinks, const at::Tensor& out, const at::Tensor& lse);

// grad [Hq] fp32 += Σ over rows of −P · D: P the sink's probability, D = d_out · out. out and lse as merged.
void add_sink_gradient(const at::Tensor& grad, const at::Tensor& sinks, const at::Tensor& out, const at::Tensor& lse,
                       const at::Tensor& d_out);

struct GpuAttention {
  double scale = 1.0;
  bool flash = false;     // ATen's flash kernels: pieces, left, deterministic; else cuDNN, twice as fast
  bool causal = true;     // row i sees keys 0 … i (as many keys as queries); else all keys
  bool backward = false;  // a backward may follow
  bool deterministic = false;
  int64_t left = -1;    // row i sees no key before i + keys − queries − left; −1: no limit
  at::Tensor pieces;    // int32 offsets: rows of one piece attend among themselves; batch is 1
  int64_t longest = 0;  // rows of the longest piece

  void set_pieces(const std::vector<int32_t>& offsets, at::Device device);
};

// Whether flash must do it, and checks that it can. masked: documents or a window.
bool needs_flash(const at::Tensor& q, const at::Tensor& v, bool masked, bool deterministic);

// q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] → out [B, Sq, Hq, Dv], log-sum-exp
// [B, Hq, Sq] fp32, and two tensors that the backward needs.
std::vector<at::Tensor> attention_gpu_forward(const GpuAttention&, const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v);

// {dq, dk, dv} from d_out and {q, k, v, out, log-sum-exp (these two also of a merge), and the forward's two}.
std::array<at::Tensor, 3> attention_gpu_backward(const GpuAttention&, const std::vector<at::Tensor>& saved,
                                                 const at::Tensor& d_out);

}  // namespace marrow
