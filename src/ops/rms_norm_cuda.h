// CUDA kernels of rms_norm.cpp. Pointers are device memory, contiguous; `stream` is a cudaStream_t.
#pragma once
#include <cstdint>

namespace marrow {

struct RmsNormArgs {
  const void* x;         // [T, H]
  const void* residual;  // [T, H], or null
  const void* weight;    // [H]
  int64_t rows;          // T
  int64_t hidden;        // H
  float eps;
  bool bf16;  // else fp32
};

// normed = rms_norm(x), or of sum = x + residual, which is written too.
void rms_norm_forward_cuda(const RmsNormArgs& args, void* sum, void* normed, void* stream);

// Most rows of `partials`: blocks of the backward, each with its own sum for the weight's gradient.
constexpr int64_t kRmsNormPartials = 1056;  // 8 for each of an H200's 132 multiprocessors

// dx = gradient through the norm + d_sum (unless null); args.x is the sum, args.residual is not
// read. weight_grad [H] (unless null) += the sum of partials [blocks, H] fp32, in a fixed order.
void rms_norm_backward_cuda(const RmsNormArgs& args, const void* d_normed, const void* d_sum,
                            void* dx, float* partials, int64_t blocks, float* weight_grad,
                            void* stream);

}  // namespace marrow
