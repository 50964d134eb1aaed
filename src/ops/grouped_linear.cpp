#include "ops/grouped_linear.h"

#include "ops/cpu_math.h"
#include "ops/device.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

// out [R, N] = rows [R, K] · op(weight[e]), where op transposes for the forward. Threads take equal
// shares of the rows: experts are of unequal size.
void multiply_rows_cpu(const Tensor& rows, const Tensor& weight, const Tensor& offsets, bool transpose,
                       const Tensor& out) {
  const int64_t inner = rows.size(1), outer = out.size(1), experts = weight.size(0);
  const int32_t* ends = ints(offsets);
  const float *x = floats(rows), *w = floats(weight);
  float* y = floats(out);
  at::parallel_for(0, rows.size(0), 128, [&](int64_t begin, int64_t end) {
    int64_t done = begin;
    for (int64_t e = 0; e < experts && done < end; ++e) {
      const int64_t stop = std::min<int64_t>(end, ends[e]);
      if (stop <= done) continue;
      sgemm(false, transpose, stop - done, outer, inner, x + done * inner, inner, w + e * inner * outer,
            transpose ? inner : outer, 0.0f, y + done * outer, outer);
      done = stop;
    }
    std::fill(y + done * outer, y + end * outer, 0.0f);
  });
}

// grad[e] [N, K] += dyᵀ · rows over the rows of e. Threads take equal shares of N.
void accumulate_cpu(const Tensor& grad, const Tensor& dy, const Tensor& rows, const Tensor& offsets) {
  const int64_t n = dy.size(1), k = rows.size(1), experts = grad.size(0);
  const int32_t* ends = ints(offsets);
  const float *d = floats(dy), *x = floats(rows);
  float* g = floats(grad);
  at::parallel_for(0, n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t first = e == 0 ? 0 : ends[e - 1], last = ends[e];
      if (last == first) continue;
      sgemm(true, false, end - begin, k, last - first, d + first * n + begin, n, x + first * k, k, 1.0f,
            g + (e * n + begin) * k, k);
    }
  });
}

// What the bf16 kernels take for themselves.
Tensor workspace_on(at::Device device) { return at::empty({kGroupedWorkspace}, at::device(device).dtype(at::kByte)); }

// fp32 on the GPU, for tests, goes by way of the host.
Tensor multiply_rows(const Tensor& rows, const Tensor& weight, const Tensor& offsets, bool transpose) {
  const int64_t outer = weight.size(transpose ? 1 : 2);
  if (rows.size(0) == 0) return at::empty({0, outer}, rows.options());
  if (rows.is_cuda() && rows.scalar_type() == at::kBFloat16) {
    if (gpu_support(rows.device()) == GpuSupport::kPlain)
      return plain_grouped_product(rows, weight, offsets, transpose);
    const Tensor out = at::empty({rows.size(0), outer}, rows.options()), workspace = workspace_on(rows.device());
    if (transpose) {
      MARROW_CUDA_CALL(grouped_forward_cuda(rows, weight, offsets, out, workspace));
    } else {
      MARROW_CUDA_CALL(grouped_input_grad_cuda(rows, weight, offsets, out, workspace));
    }
    return out;
  }
  const Tensor rows32 = rows.to(at::kCPU, at::kFloat), out = at::empty({rows.size(0), outer}, rows32.options());
  multiply_rows_cpu(rows32, weight.to(at::kCPU, at::kFloat), offsets.cpu(), transpose, out);
  return out.to(rows.options());
}

// As multiply_rows, of E4M3 values.
Tensor multiply_rows_fp8(const Fp8Matrix& rows, const Fp8Pair& weight, const Tensor& offsets, bool transpose,
                         at::ScalarType dtype) {
  const Fp8Matrix& matrices = transpose ? weight.rows : weight.transposed;  // [E, outer, inner]
  const auto empty = [&](at::ScalarType type) {
    return at::empty({rows.data.size(0), matrices.data.size(1)}, rows.data.options().dtype(type));
  };
  if (rows.data.is_cuda()) {
    const Tensor out = empty(dtype);
    MARROW_CUDA_CALL(grouped_fp8_cuda(rows.data, rows.scale, matrices.data, matrices.scale, offsets, out,
                                      workspace_on(out.device())));
    return out;
  }
  const Tensor out = empty(at::kFloat);
  multiply_rows_cpu(dequantize(rows), dequantize(matrices), offsets, true, out);
  return out.to(dtype);
}

}  // namespace

void grouped_weight_grad(const Tensor& grad, const Tensor& dy, const Tensor& rows, const Tensor& offsets) {
  const at::NoGradGuard no_grad;
  if (rows.is_cuda() && rows.scalar_type() == at::kBFloat16) {
    if (gpu_support(rows.device()) == GpuSupport::kPlain) return plain_grouped_weight_grad(grad, dy, rows, offsets);
    MARROW_CUDA_CALL(grouped_weight_grad_cuda(dy, rows, offsets, grad, workspace_on(rows.device())));
    return;
  }
  const Tensor sum = grad.cpu();
  accumulate_cpu(sum, dy.to(at::kCPU, at::kFloat), rows.to(at::kCPU, at::kFloat), offsets.cpu());
  if (!sum.is_same(grad)) grad.copy_(sum);
}

void grouped_fp8_weight_grad(const Tensor& grad, const Fp8Matrix& dy, const Fp8Matrix& rows, const Tensor& offsets) {
  const at::NoGradGuard no_grad;
  if (grad.is_cuda()) {
    MARROW_CUDA_CALL(grouped_fp8_weight_grad_cuda(dy.data, dy.scale, rows.data, rows.scale, offsets, grad,
                                                  workspace_on(grad.device())));
    return;
  }
  const Tensor d = dequantize(dy), x = dequantize(rows);
  for (int64_t e = 0, begin = 0, from = 0; e < grad.size(0); ++e) {
    const int64_t count = (ints(offsets)[e] - begin + kFp8Block - 1) / kFp8Block * kFp8Block;
    if (count > 0) grad[e].addmm_(d.narrow(1, from, count), x.narrow(1, from, count).t());
    begin = ints(offsets)[e];
    from += count;
  }
}

Tensor plain_grouped_product(const Tensor& rows, const Tensor& weight, const Tensor& offsets, bool transpose) {
  return at::_grouped_mm(rows, transpose ? weight.transpose(1, 2) : weight, offsets);
}

void plain_grouped_weight_grad(const Tensor& grad, const Tensor& dy, const Tensor& rows, const Tensor& offsets) {
  at::Tensor(grad).add_(at::_grouped_mm(dy.t(), rows, offsets));
}

Tensor grouped_linear(const Tensor& rows, const Parameter& weight, const Tensor& offsets, WeightGradQueue& queue,
                      bool input_major) {
  return grouped_linear({rows, offsets}, weight, queue, input_major).value;
}

ExpertRows grouped_linear(const ExpertRows& expert_rows, const Parameter& weight, WeightGradQueue& queue,
                          bool input_major) {
  const Tensor &rows = expert_rows.value, &offsets = expert_rows.offsets;
  const at::ScalarType dtype = rows.scalar_type();
  check_tensor(weight.name, weight.value, dtype,
               {-1, input_major ? rows.size(-1) : -1, input_major ? -1 : rows.size(-1)});
  check_tensor(weight.name + ": rows", rows, dtype, {-1, -1});
  check_tensor(weight.name + ": offsets", offsets, at::kInt, {weight.value.size(0)}, rows.device());
  const int64_t n = weight.value.size(1), k = weight.value.size(2);
  MARROW_CHECK(rows.is_cpu() || rows.scalar_type() == at::kFloat || (n % 8 == 0 && k % 8 == 0), ExitCode::kUsage,
               Fix("choose hidden and intermediate sizes divisible by 8, or set train.dtype = "
                   "\"fp32\""),
               "{}: the grouped bf16 product needs sizes divisible by 8, not [{}, {}]", weight.name, n, k);
  const Tensor in = rows.detach();
  const bool weight8 = rows.requires_grad() && weight_grad_in_fp8(weight, in);
  // What the products read of x or of dy in fp8.
  const auto forms = [=](const Tensor& from, const std::shared_ptr<Fp8Handover>& handover, Fp8Product product) {
    const bool direct = from.size(0) > 0 && fp8_wins(weight, product, from, n * k / from.size(1));
    return direct || weight8 ? take_over(handover, from, offsets, direct, weight8) : Fp8Pair{};
  };
  const auto multiply = [=](const Tensor& from, const Fp8Pair& form, bool transpose) {
    if (!form.rows.data.defined()) return multiply_rows(from, weight.value, offsets, transpose);
    return multiply_rows_fp8(form.rows, weight.fp8->of(weight.value), offsets, transpose, dtype);
  };
  const Fp8Pair in8 = forms(in, expert_rows.fp8, Fp8Product::kExpertForward);
  ExpertRows out{multiply(in, in8, !input_major), offsets};
  if (rows.requires_grad()) out.d_value_fp8 = make_handover(weight, Fp8Product::kExpertInputGrad, out.value);
  const auto backward = [=, &queue, handover = out.d_value_fp8, kept = weight8 ? Tensor() : in,
                         kept8 = in8.transposed](const variable_list& d_out) -> variable_list {
    const Tensor dy = d_out[0].contiguous(), &grad = weight.grad;
    const Fp8Pair dy8 = forms(dy, handover, Fp8Product::kExpertInputGrad);
    if (weight8) {
      queue.push([=, late = dy8.transposed] {
        grouped_fp8_weight_grad(grad, input_major ? kept8 : late, input_major ? late : kept8, offsets);
      });
    } else if (grad.defined() && kept.size(0) > 0) {
      queue.push([=] { grouped_weight_grad(grad, input_major ? kept : dy, input_major ? dy : kept, offsets); });
    }
    return {multiply(dy, dy8, input_major)};
  };
  out.value = differentiable({rows}, {out.value}, backward)[0];
  return out;
}

}  // namespace marrow
