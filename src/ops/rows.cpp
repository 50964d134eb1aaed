#include "ops/rows.h"

#include <cstring>

#include "ops/op_tools.h"

namespace marrow {
namespace {

void sort_pairs_cpu(const Tensor& experts, int64_t groups, int64_t each, const ExpertPermutation& result) {
  const int64_t pairs = experts.numel(), top_k = experts.size(1);
  int32_t *ends = ints(result.offsets), *source = ints(result.map.source_of_row);
  int32_t *rows = ints(result.map.rows_of_source), *slots = ints(result.slot_of_row);
  std::vector<int32_t> next(groups + 1, 0);  // next[g] becomes the next free row of g
  for (int64_t i = 0; i < pairs; ++i) {
    rows[i] = pair_sort_key(ints(experts), i, top_k, static_cast<int32_t>(groups), static_cast<int32_t>(each));
    if (rows[i] >= 0) ++next[rows[i] + 1];
  }
  for (int64_t g = 0; g < groups; ++g) ends[g] = next[g + 1] += next[g];
  for (int64_t i = 0; i < pairs; ++i) {
    if (rows[i] < 0) continue;
    rows[i] = next[rows[i]]++;
    source[rows[i]] = static_cast<int32_t>(i / top_k);
    slots[rows[i]] = static_cast<int32_t>(i);
  }
  std::fill(source + ends[groups - 1], source + pairs, -1);
  std::fill(slots + ends[groups - 1], slots + pairs, -1);
}

// Checks `matrix` [?, H], in a working dtype, and the index that moves its rows.
void check_map(const Tensor& matrix, const Tensor& index, const char* name) {
  check_tensor("rows", matrix, kWorkingDtype, {-1, -1});
  check_tensor(name, index, at::kInt, index.sizes(), matrix.device());
}

// out [rows, H]. of_out: for the GPU.
Tensor gather(const Tensor& x, const RowMap& map, const Tensor& out, const ExpertRowsView& of_out) {
  const Tensor& source_of_row = map.source_of_row;
  check_map(x, source_of_row, "source_of_row");
  if (of_out.offsets.defined()) check_map(x, map.rows_of_source, "rows_of_source");
  const int64_t rows = out.size(0);
  MARROW_CHECK(rows <= source_of_row.size(0) && (!of_out.offsets.defined() || map.rows_of_source.size(0) == x.size(0)),
               ExitCode::kUsage, Fix("pass the RowMap that was built for these rows (ops/rows.h)"),
               "{} rows of {} by a map from {} to {}", rows, x.size(0), c10::str(map.rows_of_source.sizes()),
               source_of_row.size(0));
  if (x.is_cuda()) {
    MARROW_CUDA_CALL(gather_rows_cuda(x, source_of_row, map.rows_of_source, out, of_out));
    return out;
  }
  const int32_t* source = ints(source_of_row);
  const int64_t bytes = x.size(1) * static_cast<int64_t>(x.element_size());
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(out.data_ptr());
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

// Sizes alone, without memory: who reads it faults.
Tensor no_rows_like(const Tensor& x, int64_t rows) {
  const Tensor out = at::empty({0}, x.options());
  out.unsafeGetTensorImpl()->set_sizes_contiguous({rows, x.size(1)});
  return out;
}

Tensor rows_like(const Tensor& x, int64_t rows) { return at::empty({rows, x.size(1)}, x.options()); }

// [rows, H] of x with offsets, handed over as `handover` says.
ExpertRows gather_expert(const Tensor& x, const RowMap& map, int64_t rows, const Tensor& offsets,
                         const std::shared_ptr<Fp8Handover>& handover) {
  if (handover != nullptr && handover->both && x.is_cuda()) {
    check_map(x, map.source_of_row, "source_of_row");
    const ExpertRows out{no_rows_like(x, rows), offsets, handover};
    handover->forms = quantize_expert_rows(x, offsets, true, true, map.source_of_row.narrow(0, 0, rows));
    handover->of = out.value.variable_data();
    return out;
  }
  const ExpertRows out{rows_like(x, rows), offsets, handover};
  const Fp8Matrix written = memory_for(handover, out.value);
  gather(x, map, out.value, {written.data, written.scale, offsets});
  hand_over(handover, out.value, offsets, written);
  return out;
}

// totals [T, H] fp32 += Σ_j rows[rows_of_source[t, j]], rows fp32.
void add_rows_cpu(const Tensor& rows, const Tensor& rows_of_source, const Tensor& totals) {
  const int32_t* index = ints(rows_of_source);
  const int64_t sources = rows_of_source.size(1), width = rows.size(1);
  at::parallel_for(0, totals.size(0), 128, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin * sources; pair < end * sources; ++pair) {
      if (index[pair] < 0 || index[pair] >= rows.size(0)) continue;
      const float* from = floats(rows) + index[pair] * width;
      float* total = floats(totals) + pair / sources * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) total[i] += from[i];
    }
  });
}

Tensor sum(const Tensor& rows, const Tensor& rows_of_source, const Tensor& residual) {
  check_map(rows, rows_of_source, "rows_of_source");
  const int64_t tokens = rows_of_source.size(0), width = rows.size(1);
  if (residual.defined()) {
    check_tensor("sum_rows: the residual", residual, rows.scalar_type(), {tokens, width});
  }
  if (rows.is_cuda()) {
    const Tensor out = at::empty({tokens, width}, rows.options());
    MARROW_CUDA_CALL(sum_rows_cuda(rows, rows_of_source, residual, out));
    return out;
  }
  const Tensor totals = residual.defined() ? residual.to(at::kFloat, false, /*copy=*/true) : at::zeros({tokens, width});
  add_rows_cpu(rows.to(at::kFloat), rows_of_source, totals);
  return totals.to(rows.scalar_type());
}

Backward gather_backward(const RowMap& map) {
  return [index = map.rows_of_source](const variable_list& d_out) -> variable_list {
    return {sum(d_out[0].contiguous(), index, {})};
  };
}

Tensor gather_scalars(const Tensor& values, const Tensor& index) {
  const Tensor out = at::empty(index.sizes(), values.options());
  if (values.is_cuda()) {
    MARROW_CUDA_CALL(gather_values_cuda(values, index, out));
    return out;
  }
  const int32_t* from = ints(index);
  for (int64_t i = 0; i < index.numel(); ++i) floats(out)[i] = from[i] < 0 ? 0.0f : floats(values)[from[i]];
  return out;
}

}  // namespace

ExpertPermutation rank_permutation(const Tensor& experts, int64_t groups, int64_t each) {
  check_tensor("expert_permutation: experts", experts, at::kInt, {-1, -1});
  MARROW_CHECK(experts.size(1) > 0 && experts.numel() < (int64_t{1} << 31), ExitCode::kUsage,
               Fix("lower train.micro_batch: fewer than 2^31 / k tokens a micro-batch"),
               "expert_permutation: experts are {}", c10::str(experts.sizes()));
  MARROW_CHECK(groups > 0 && groups <= 1024, ExitCode::kUsage, Fix("use a model with at most 1024 experts a layer"),
               "{} experts are outside [1, 1024]", groups);
  const int64_t pairs = experts.numel(), blocks = (pairs + kPairsPerBlock - 1) / kPairsPerBlock;
  const ExpertPermutation result{{at::empty({pairs}, experts.options()), at::empty(experts.sizes(), experts.options())},
                                 at::empty({groups}, experts.options()),
                                 at::empty({pairs}, experts.options())};
  if (experts.is_cpu()) {
    sort_pairs_cpu(experts, groups, each, result);
    return result;
  }
  const Tensor block_rows = at::empty({blocks, groups}, experts.options());
  MARROW_CUDA_CALL(sort_pairs_cuda(experts, each, block_rows, result.offsets, result.map.source_of_row,
                                   result.map.rows_of_source, result.slot_of_row));
  return result;
}

Tensor gather_rows(const Tensor& x, const RowMap& map, int64_t rows, const Tensor& offsets) {
  const Tensor out = gather(x.detach(), map, rows_like(x, rows), {{}, {}, offsets});
  return differentiable({x}, {out}, gather_backward(map))[0];
}

ExpertRows gather_expert_rows(const Tensor& x, const ExpertPermutation& permutation, int64_t rows,
                              const Parameter& reader) {
  ExpertRows out = gather_expert(x.detach(), permutation.map, rows, permutation.offsets,
                                 make_handover(reader, Fp8Product::kExpertForward, no_rows_like(x, rows)));
  out.value = differentiable({x}, {out.value}, gather_backward(permutation.map))[0];
  return out;
}

Tensor sum_rows(const ExpertRows& expert_rows, const RowMap& map, const Tensor& residual) {
  const Tensor& rows = expert_rows.value;
  const auto backward = [map, count = rows.size(0), differs = rows.requires_grad(), added = residual.defined(),
                         offsets = expert_rows.offsets,
                         handover = expert_rows.d_value_fp8](const variable_list& d_out) -> variable_list {
    const Tensor d_sum = d_out[0].contiguous();
    return {differs ? gather_expert(d_sum, map, count, offsets, handover).value : Tensor(),
            added ? d_out[0] : Tensor()};
  };
  const Tensor start = residual.defined() ? residual.detach() : residual;
  return differentiable({rows, residual}, {sum(rows.detach(), map.rows_of_source, start)}, backward)[0];
}

Tensor gather_values(const Tensor& weights, const ExpertPermutation& permutation, int64_t rows) {
  const Tensor& rows_of_source = permutation.map.rows_of_source;
  check_tensor("gather_values: weights", weights, at::kFloat, rows_of_source.sizes());
  const auto backward = [rows_of_source](const variable_list& d_out) -> variable_list {
    return {gather_scalars(d_out[0].contiguous(), rows_of_source)};
  };
  return differentiable({weights}, {gather_scalars(weights.detach(), permutation.slot_of_row.narrow(0, 0, rows))},
                        backward)[0];
}

}  // namespace marrow
