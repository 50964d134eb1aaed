#include "ops/rows.h"

#include <cstring>

#include "ops/cuda_launch.h"
#include "ops/rows_cuda.h"

namespace marrow {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Fix map_fix() { return Fix("pass the RowMap that was built for these rows (ops/row_map.h)"); }

void check_map(const Tensor& matrix, const Tensor& index, const char* name) {
  MARROW_CHECK(matrix.dim() == 2 && matrix.is_contiguous() &&
                   (matrix.scalar_type() == at::kFloat || matrix.scalar_type() == at::kBFloat16),
               ExitCode::kUsage, map_fix(),
               "rows must be a contiguous fp32 or bf16 matrix, not {} {}", c10::str(matrix.sizes()),
               c10::toString(matrix.scalar_type()));
  MARROW_CHECK(
      index.scalar_type() == at::kInt && index.is_contiguous() && index.device() == matrix.device(),
      ExitCode::kUsage, map_fix(), "{} must be contiguous int32 on {}, not {} on {}", name,
      matrix.device().str(), c10::toString(index.scalar_type()), index.device().str());
}

Tensor gather(const Tensor& x, const Tensor& source_of_row, int64_t rows) {
  check_map(x, source_of_row, "source_of_row");
  MARROW_CHECK(rows <= source_of_row.size(0), ExitCode::kUsage, map_fix(),
               "{} rows of a map with {}", rows, source_of_row.size(0));
  Tensor out = at::empty({rows, x.size(1)}, x.options());
  const auto* source = source_of_row.const_data_ptr<int32_t>();
  const auto size = static_cast<int64_t>(x.element_size());
  if (x.is_cuda()) {
    MARROW_CUDA_CALL(gather_rows_cuda(x.const_data_ptr(), source, out.mutable_data_ptr(), rows,
                                      x.size(1), size, current_cuda_stream()));
    return out;
  }
  const int64_t bytes = x.size(1) * size;
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  at::parallel_for(0, rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (source[r] < 0) {
        std::memset(to + r * bytes, 0, bytes);
      } else {
        std::memcpy(to + r * bytes, from + source[r] * bytes, bytes);
      }
    }
  });
  return out;
}

template <typename T>
void sum_cpu(const T* rows, const Tensor& rows_of_source, const T* residual, T* out, int64_t width,
             int64_t row_count) {
  const auto* index = rows_of_source.const_data_ptr<int32_t>();
  const int64_t sources = rows_of_source.size(1);
  at::parallel_for(0, rows_of_source.size(0), 128, [&](int64_t begin, int64_t end) {
    std::vector<float> totals(width);
    for (int64_t t = begin; t < end; ++t) {
      float* total = totals.data();
      const T* first = residual == nullptr ? nullptr : residual + t * width;
      for (int64_t i = 0; i < width; ++i) total[i] = first == nullptr ? 0.0f : float(first[i]);
      for (int64_t j = 0; j < sources; ++j) {
        const int64_t row = index[t * sources + j];
        if (row < 0 || row >= row_count) continue;
        const T* from = rows + row * width;
        for (int64_t i = 0; i < width; ++i) total[i] += float(from[i]);
      }
      for (int64_t i = 0; i < width; ++i) out[t * width + i] = T(total[i]);
    }
  });
}

Tensor sum(const Tensor& rows, const Tensor& rows_of_source, const Tensor& residual) {
  check_map(rows, rows_of_source, "rows_of_source");
  const int64_t tokens = rows_of_source.size(0), width = rows.size(1);
  MARROW_CHECK(!residual.defined() ||
                   (residual.sizes() == at::IntArrayRef({tokens, width}) &&
                    residual.is_contiguous() && residual.scalar_type() == rows.scalar_type()),
               ExitCode::kUsage, map_fix(), "the residual must be contiguous [{}, {}] {}, not {}",
               tokens, width, c10::toString(rows.scalar_type()), c10::str(residual.sizes()));
  Tensor out = at::empty({tokens, width}, rows.options());
  const void* added = residual.defined() ? residual.const_data_ptr() : nullptr;
  const bool bf16 = rows.scalar_type() == at::kBFloat16;
  if (rows.is_cuda()) {
    MARROW_CUDA_CALL(sum_rows_cuda(rows.const_data_ptr(), rows_of_source.const_data_ptr<int32_t>(),
                                   added, out.mutable_data_ptr(), tokens, rows_of_source.size(1),
                                   rows.size(0), width, bf16, current_cuda_stream()));
  } else if (bf16) {
    sum_cpu(rows.const_data_ptr<at::BFloat16>(), rows_of_source,
            static_cast<const at::BFloat16*>(added), out.mutable_data_ptr<at::BFloat16>(), width,
            rows.size(0));
  } else {
    sum_cpu(rows.const_data_ptr<float>(), rows_of_source, static_cast<const float*>(added),
            out.mutable_data_ptr<float>(), width, rows.size(0));
  }
  return out;
}

Tensor gather_scalars(const Tensor& values, const Tensor& index) {
  Tensor out = at::empty(index.sizes(), values.options());
  const auto* from = values.const_data_ptr<float>();
  const auto* indices = index.const_data_ptr<int32_t>();
  auto* to = out.mutable_data_ptr<float>();
  if (values.is_cuda()) {
    MARROW_CUDA_CALL(gather_values_cuda(from, indices, to, index.numel(), current_cuda_stream()));
    return out;
  }
  for (int64_t i = 0; i < index.numel(); ++i) to[i] = indices[i] < 0 ? 0.0f : from[indices[i]];
  return out;
}

class GatherRows : public torch::autograd::Function<GatherRows> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& source_of_row,
                        const Tensor& rows_of_source, int64_t rows) {
    ctx->save_for_backward({rows_of_source});
    return gather(x, source_of_row, rows);
  }
  static variable_list backward(AutogradContext* ctx, variable_list d_out) {
    return {sum(d_out[0].contiguous(), ctx->get_saved_variables()[0], {}), {}, {}, {}};
  }
};

class SumRows : public torch::autograd::Function<SumRows> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& source_of_row,
                        const Tensor& rows_of_source, const std::optional<Tensor>& residual) {
    ctx->save_for_backward({source_of_row});
    ctx->saved_data["rows"] = rows.size(0);
    ctx->saved_data["residual"] = residual.has_value();
    return sum(rows, rows_of_source, residual.value_or(Tensor()));
  }
  static variable_list backward(AutogradContext* ctx, variable_list d_out) {
    Tensor d_rows;
    if (ctx->needs_input_grad(0)) {
      d_rows = gather(d_out[0].contiguous(), ctx->get_saved_variables()[0],
                      ctx->saved_data["rows"].toInt());
    }
    return {d_rows, {}, {}, ctx->saved_data["residual"].toBool() ? d_out[0] : Tensor()};
  }
};

class GatherValues : public torch::autograd::Function<GatherValues> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& weights, const Tensor& slot_of_row,
                        const Tensor& rows_of_source) {
    ctx->save_for_backward({rows_of_source});
    return gather_scalars(weights, slot_of_row);
  }
  static variable_list backward(AutogradContext* ctx, variable_list d_out) {
    return {gather_scalars(d_out[0].contiguous(), ctx->get_saved_variables()[0]), {}, {}};
  }
};

}  // namespace

Tensor gather_rows(const Tensor& x, const RowMap& map, int64_t rows) {
  return GatherRows::apply(x, map.source_of_row, map.rows_of_source, rows);
}

Tensor sum_rows(const Tensor& rows, const RowMap& map, const Tensor& residual) {
  const auto given = residual.defined() ? std::optional(residual) : std::nullopt;
  return SumRows::apply(rows, map.source_of_row, map.rows_of_source, given);
}

Tensor gather_values(const Tensor& weights, const ExpertPermutation& permutation) {
  MARROW_CHECK(weights.scalar_type() == at::kFloat && weights.is_contiguous() &&
                   weights.numel() == permutation.slot_of_row.numel(),
               ExitCode::kUsage, map_fix(), "{} weights of {} for a permutation of {} pairs",
               weights.numel(), c10::toString(weights.scalar_type()),
               permutation.slot_of_row.numel());
  return GatherValues::apply(weights, permutation.slot_of_row, permutation.map.rows_of_source);
}

}  // namespace marrow
