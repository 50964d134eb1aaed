#include "ops/grouped_linear.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

struct Range {
  int64_t begin, end;
};

Range expert_rows(const int32_t* offsets, int64_t expert) {
  return {expert == 0 ? 0 : offsets[expert - 1], offsets[expert]};
}

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
      const auto [first, last] = expert_rows(ends, e);
      if (last == first) continue;
      sgemm(true, false, end - begin, k, last - first, d + first * n + begin, n, x + first * k, k, 1.0f,
            g + (e * n + begin) * k, k);
    }
  });
}

// Products of odd sizes and fp32 on the GPU, for tests: reads the offsets back, which waits.
void for_each_expert_gpu(const Tensor& offsets, const std::function<void(int64_t, Range)>& body) {
  const Tensor host = offsets.cpu();
  for (int64_t e = 0; e < host.size(0); ++e) {
    const Range range = expert_rows(ints(host), e);
    if (range.begin < range.end) body(e, range);
  }
}

Tensor multiply_rows(const Tensor& rows, const Tensor& weight, const Tensor& offsets, bool transpose) {
  const int64_t outer = weight.size(transpose ? 1 : 2);
  const Tensor matrix = transpose ? weight.transpose(1, 2) : weight;
  if (rows.size(0) == 0) return at::empty({0, outer}, rows.options());
  if (rows.is_cpu()) {
    Tensor out = at::empty({rows.size(0), outer}, rows.options().dtype(at::kFloat));
    multiply_rows_cpu(rows.to(at::kFloat), weight.to(at::kFloat), offsets, transpose, out);
    return out.to(rows.scalar_type());
  }
  if (rows.scalar_type() == at::kBFloat16) return at::_grouped_mm(rows, matrix, offsets);
  Tensor out = at::empty({rows.size(0), outer}, rows.options());
  for_each_expert_gpu(offsets, [&](int64_t e, Range r) {
    Tensor part = out.slice(0, r.begin, r.end);
    at::mm_out(part, rows.slice(0, r.begin, r.end), matrix.select(0, e));
  });
  return out;
}

void accumulate(const Tensor& grad, const Tensor& dy, const Tensor& rows, const Tensor& offsets) {
  const at::NoGradGuard no_grad;
  if (rows.is_cpu()) {
    accumulate_cpu(grad, dy.to(at::kFloat), rows.to(at::kFloat), offsets);
  } else if (rows.scalar_type() == at::kBFloat16) {
    const Tensor added = at::_grouped_mm(dy.t(), rows, offsets);
    MARROW_CUDA_CALL(add_bf16_to_fp32_cuda(grad, added));
  } else {
    for_each_expert_gpu(offsets, [&](int64_t e, Range r) {
      grad.select(0, e).addmm_(dy.slice(0, r.begin, r.end).t(), rows.slice(0, r.begin, r.end));
    });
  }
}

struct GroupedLinearState {
  Parameter weight;  // of which value and gradient may come and go between forward and backward
  WeightGradQueue* queue;
};

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& offsets,
                        const GroupedLinearState& state) {
    ctx->save_for_backward({rows, offsets});
    save_state(ctx, state);
    return multiply_rows(rows, state.weight.value, offsets, true);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_out) {
    const auto& state = saved_state<GroupedLinearState>(ctx);
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &rows = saved[0], &offsets = saved[1], &grad = state.weight.grad;
    const Tensor dy = d_out[0].contiguous();
    if (grad.defined() && rows.size(0) > 0) {
      state.queue->push([=] { accumulate(grad, dy, rows, offsets); });
    }
    return {multiply_rows(dy, state.weight.value, offsets, false), {}, {}};
  }
};

}  // namespace

Tensor grouped_linear(const Tensor& rows, const Parameter& weight, const Tensor& offsets, WeightGradQueue& queue) {
  const at::ScalarType dtype = rows.scalar_type();
  check_tensor(weight.name, weight.value, dtype, {-1, -1, rows.size(-1)});
  check_tensor(weight.name + ": rows", rows, dtype, {-1, -1});
  check_tensor(weight.name + ": offsets", offsets, at::kInt, {weight.value.size(0)}, rows.device());
  const int64_t n = weight.value.size(1), k = weight.value.size(2);
  MARROW_CHECK(rows.is_cpu() || rows.scalar_type() == at::kFloat || (n % 8 == 0 && k % 8 == 0), ExitCode::kUsage,
               Fix("choose hidden and intermediate sizes divisible by 8, or set train.dtype = "
                   "\"fp32\""),
               "{}: the grouped bf16 product needs sizes divisible by 8, not [{}, {}]", weight.name, n, k);
  return GroupedLinear::apply(rows, offsets, GroupedLinearState{weight, &queue});
}

}  // namespace marrow
