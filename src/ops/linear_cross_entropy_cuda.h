#pragma once
#include <cstdint>

namespace marrow {

// Row r of logits [rows, vocabulary] (bf16 or fp32): losses[r] = -log softmax(row)[targets[r]], 0
// where the target is -1 (NaN where it is outside the vocabulary). with_gradient overwrites the row
// by gradient_scale · d loss / d logits.
void cross_entropy_cuda(void* logits, const int32_t* targets, float* losses, int64_t rows,
                        int64_t vocabulary, bool bf16, float gradient_scale, bool with_gradient,
                        void* stream);

// *loss_sum = Σ losses, in a fixed order, in fp64.
void sum_losses_cuda(const float* losses, int64_t count, float* loss_sum, void* stream);

}  // namespace marrow
