#pragma once
#include <cstdint>

namespace marrow {

// accumulator [n] fp32 += addend [n] bf16.
void add_bf16_to_fp32_cuda(float* accumulator, const void* addend, int64_t n, void* stream);

}  // namespace marrow
