#include "ops/expert_bias.h"

#include "ops/op_tools.h"

namespace marrow {
namespace {

// Of the CPU: each row's expert; the last one's where it has none.
Tensor expert_of_rows(const Tensor& offsets, int64_t rows) {
  const Tensor row = at::arange(rows, offsets.options());
  return at::searchsorted(offsets, row, /*out_int32=*/false, /*right=*/true).clamp_max_(offsets.size(0) - 1);
}

void add_bias(Tensor rows, const Tensor& bias, const Tensor& offsets, const Tensor& row_weights) {
  if (rows.numel() == 0) return;
  if (rows.is_cuda()) {
    MARROW_CUDA_CALL(add_expert_bias_cuda(rows, bias, offsets, row_weights));
    return;
  }
  const Tensor added = bias.index_select(0, expert_of_rows(offsets, rows.size(0)));
  row_weights.defined() ? rows.addcmul_(added, row_weights.unsqueeze(1)) : rows.add_(added);
}

Tensor row_weight_grad(const Tensor& dy, const Tensor& bias, const Tensor& offsets) {
  if (!dy.is_cuda()) {
    return at::sum(dy.to(at::kFloat) * bias.index_select(0, expert_of_rows(offsets, dy.size(0))), 1);
  }
  const Tensor d_weights = at::empty({dy.size(0)}, dy.options().dtype(at::kFloat));
  if (dy.size(0) > 0) MARROW_CUDA_CALL(expert_bias_row_weight_grad_cuda(dy, bias, offsets, d_weights));
  return d_weights;
}

void accumulate_bias_grad(Tensor grad, const Tensor& dy, const Tensor& row_weights, const Tensor& offsets) {
  if (dy.is_cuda()) {
    MARROW_CUDA_CALL(expert_bias_grad_cuda(dy, row_weights, offsets, grad));
    return;
  }
  const Tensor begins = at::cat({at::zeros({1}, offsets.options()), offsets});
  const Tensor d_rows = row_weights.defined() ? dy * row_weights.unsqueeze(1) : dy.to(at::kFloat);
  grad.add_(at::segment_reduce(d_rows, "sum", {}, {}, begins, 0, /*unsafe=*/true, 0.0));
}

}  // namespace

Tensor add_expert_bias_(const Tensor& rows, const Parameter& bias, const Tensor& offsets, const Tensor& row_weights,
                        WeightGradQueue& queue) {
  check_tensor(bias.name + ": rows", rows, kWorkingDtype, {-1, bias.value.size(-1)});
  check_tensor(bias.name, bias.value, rows.scalar_type(), {-1, -1});
  check_tensor(bias.name + ": offsets", offsets, at::kInt, {bias.value.size(0)}, rows.device());
  if (row_weights.defined()) check_tensor(bias.name + ": row_weights", row_weights, at::kFloat, {rows.size(0)});
  const Tensor out = rows.detach(), weights = row_weights.defined() ? row_weights.detach() : row_weights;
  add_bias(out, bias.value, offsets, weights);
  return differentiable({rows, row_weights}, {out}, [=, &queue](const variable_list& d_out) -> variable_list {
    const Tensor dy = d_out[0].contiguous();
    if (bias.grad.defined() && dy.size(0) > 0) {
      queue.push([=] { accumulate_bias_grad(bias.grad, dy, weights, offsets); });
    }
    return {dy, weights.defined() ? row_weight_grad(dy, bias.value, offsets) : Tensor()};
  })[0];
}

}  // namespace marrow
