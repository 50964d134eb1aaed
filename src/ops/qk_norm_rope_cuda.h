// CUDA kernels of qk_norm_rope.cpp. Pointers are device memory; `stream` is a cudaStream_t.
#pragma once
#include <cstdint>

namespace marrow {

struct QkNormRopeArgs {
  const void* qkv;           // [T, (Hq + 2·Hkv)·D]
  const void* q_norm;        // [D]
  const void* k_norm;        // [D]
  const float* cos;          // [P, D/2]
  const float* sin;          // [P, D/2]
  const int32_t* positions;  // [T]
  int64_t tokens;
  int64_t q_heads;
  int64_t kv_heads;
  int64_t head_size;  // D, even, at most 512
  float eps;
  bool bf16;  // else fp32
};

// q [T, Hq, D] and k [T, Hkv, D], contiguous.
void qk_norm_rope_forward_cuda(const QkNormRopeArgs& args, void* q, void* k, void* stream);

// Most rows of the backward's `partials`, one a block.
constexpr int64_t kQkNormPartials = 1056;  // 8 for each of an H200's 132 multiprocessors

// d_qkv, contiguous as qkv, from dq, dk, dv (contiguous). q_norm_grad and k_norm_grad [D] fp32, or
// null, += sums of partials [blocks, 2D] fp32, in a fixed order.
void qk_norm_rope_backward_cuda(const QkNormRopeArgs& args, const void* dq, const void* dk,
                                const void* dv, void* d_qkv, float* partials, int64_t blocks,
                                float* q_norm_grad, float* k_norm_grad, void* stream);

}  // namespace marrow
