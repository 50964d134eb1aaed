#pragma once
#include <cstdint>

namespace marrow {

constexpr int64_t kSumBlocks = 1056;  // partial sums; fixed, so that the order of adding is too

// *total += Σ flat[i]²; partial [kSumBlocks] fp64 is scratch.
void add_sum_of_squares_cuda(const float* flat, int64_t n, double* partial, double* total,
                             void* stream);

}  // namespace marrow
