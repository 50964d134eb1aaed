// Recurrent layers over sequences that the ranks of a context group share, split as context_attention.h does.
#pragma once
#include "ops/attention.h"
#include "ops/parameter.h"
#include "parallel/communicator.h"

namespace marrow {

// The operators of ops/short_convolution.h and ops/gated_delta_rule.h over the micro-batch that `layout` describes
// whole, each document (or sequence) from a state of zeros; a rank has its rows of the tensors. No ring, or one rank:
// the operators themselves. Every rank must call them, and their backwards, in the same order. What a chunk needs of
// those before it (rows of the convolution; states) is gathered from all ranks, and so are its gradients, in fp32.
at::Tensor context_short_convolution(const at::Tensor& x,      // [T / cp, C]
                                     const Parameter& weight,  // [C, K]
                                     const AttentionLayout& layout, Communicator* ring);
// → [T / cp, Hv, Dv]
at::Tensor context_gated_delta_rule(const at::Tensor& q,     // [T / cp, Hk, Dk]
                                    const at::Tensor& k,     // [T / cp, Hk, Dk]
                                    const at::Tensor& v,     // [T / cp, Hv, Dv]
                                    const at::Tensor& g,     // [T / cp, Hv] fp32
                                    const at::Tensor& beta,  // [T / cp, Hv] fp32
                                    const AttentionLayout& layout, Communicator* ring);

}  // namespace marrow
