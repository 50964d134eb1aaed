// The head and its loss in one: logits of the whole batch never exist.
#pragma once
#include "ops/parameter.h"

namespace marrow {

struct LinearCrossEntropy {
  at::Tensor loss_sum;  // [1] fp32: Σ over trained targets of -log p
  at::Tensor d_x;       // [T, H] in x's dtype: gradient_scale · d loss_sum / d x; undefined without
};

// x [T, H] fp32 or bf16, weight [V, H] of the same dtype, targets [T] int32, -1 = not trained. The last operator of a
// model: with_gradient computes d_x and adds gradient_scale · d loss_sum / d weight into weight.grad at once;
// gradient_scale is 1 / targets of the global batch. Records no autograd node.
LinearCrossEntropy linear_cross_entropy(const at::Tensor& x, const Parameter& weight, const at::Tensor& targets,
                                        double gradient_scale, bool with_gradient);

// Rows of logits that exist at a time: in x's dtype on a GPU, in fp32 on the CPU.
int64_t cross_entropy_rows(int64_t tokens, int64_t vocabulary, bool on_cpu);

}  // namespace marrow
