// CUDA kernel of philox_normal.cpp.
#pragma once
#include "ops/philox_normal_math.h"

namespace marrow {

// out [n] fp32 or bf16 in device memory; `stream` is a cudaStream_t.
void philox_normal_cuda(void* out, bool bf16, int64_t n, const philox::Key& key,
                        int64_t first_element, float std, void* stream);

}  // namespace marrow
