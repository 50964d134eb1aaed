// Queries, keys and values of multi-head latent attention, their rotary parts turned.
#pragma once
#include "ops/qk_norm_rope.h"

namespace marrow {

// q and k [T, Hq, Dn + Dr] and v [T, Hq, Dv], all contiguous. The first Dn elements of a head are q's and kv's as they
// are; the last Dr of a query are its own, those of a key are k_rope's in every head, both rotated, element 2i paired
// with 2i + 1. All sizes even. Saves no activation.
std::tuple<at::Tensor, at::Tensor, at::Tensor> mla_rope(const at::Tensor& q,          // [T, Hq·(Dn + Dr)] fp32 or bf16
                                                        const at::Tensor& kv,         // [T, Hq·(Dn + Dv)]
                                                        const at::Tensor& k_rope,     // [T, Dr], any row stride
                                                        const RopeTable& table,       // of Dr; positions below P
                                                        const at::Tensor& positions,  // [T] int32
                                                        int64_t heads, int64_t value_size);

}  // namespace marrow
