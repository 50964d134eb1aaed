// CUDA kernels of swiglu.cpp. Pointers are device memory, contiguous; `stream` is a cudaStream_t.
#pragma once
#include <cstdint>

namespace marrow {

struct SwigluArgs {
  const void* gate_up;      // [R, 2I]
  const float* row_weight;  // [R], or null for 1
  int64_t rows;             // R
  int64_t width;            // I
  bool bf16;                // else fp32
};

void swiglu_forward_cuda(const SwigluArgs& args, void* out, void* stream);

// d_row_weight may be null.
void swiglu_backward_cuda(const SwigluArgs& args, const void* d_out, void* d_gate_up,
                          float* d_row_weight, void* stream);

}  // namespace marrow
