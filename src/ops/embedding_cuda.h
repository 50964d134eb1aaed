// CUDA kernels of embedding.cpp. All pointers are device memory; `stream` is a cudaStream_t.
#pragma once
#include <cstdint>

namespace marrow {

// out[t] = weight[ids[t]] for t < tokens; rows of row_bytes.
void embedding_forward_cuda(const int32_t* ids, const void* weight, void* out, int64_t tokens,
                            int64_t row_bytes, void* stream);

// grad[ids[t]] += d_out[t] with fp32 atomics.
void embedding_backward_cuda(const int32_t* ids, const void* d_out, bool bf16, float* grad,
                             int64_t tokens, int64_t hidden, void* stream);

// The same in the order given: sorted_ids ascends, and position[i] is the token of sorted_ids[i].
void embedding_backward_sorted_cuda(const int32_t* sorted_ids, const int64_t* position,
                                    const void* d_out, bool bf16, float* grad, int64_t tokens,
                                    int64_t hidden, void* stream);

}  // namespace marrow
