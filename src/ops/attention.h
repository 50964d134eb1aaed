// Causal grouped-query attention over sequences, documents and windows.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// How [T] flattened tokens, T = sequences · seq_len, attend: row i sees keys [max(document start, i − window + 1), i].
struct AttentionLayout {
  int64_t sequences = 1;
  int64_t seq_len = 0;
  // Cumulative token offsets of documents, 0 and T included, ascending (equal neighbours allowed);
  // every multiple of seq_len must be one of them. Empty: each sequence is one document.
  std::vector<int32_t> document_offsets;
  int64_t window = 0;  // keys a row sees, itself included; 0 = no limit
};

// Document offsets, or those of the sequences.
std::vector<int64_t> segments_of(const AttentionLayout& layout);

// softmax(q kᵀ · scale) v → [T, Hq, Dv]. Hq is a multiple of Hkv; head h reads k/v head h·Hkv/Hq.
// Inputs fp32 or bf16 with contiguous last dimension; any token and head stride. On the GPU: bf16
// by cuDNN, or by ATen's flash kernels with documents, a window or `deterministic` (cuDNN's
// backward is not); these need Dv ≤ D. fp32 on the GPU goes by way of the host, for tests.
// `sinks` [Hq] in q's dtype (or its value undefined): a logit of each head that takes part in every row's softmax and
// has no value; the backward adds into its grad, if defined.
at::Tensor attention(const at::Tensor& q,  // [T, Hq, D]
                     const at::Tensor& k,  // [T, Hkv, D]
                     const at::Tensor& v,  // [T, Hkv, Dv]
                     const AttentionLayout& layout, double scale, bool deterministic = false,
                     const Parameter& sinks = {});

// Throws unless the tensors fit each other and the layout; `ranks`: each has that part of its tokens.
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionLayout& layout,
                     int64_t ranks = 1);

}  // namespace marrow
