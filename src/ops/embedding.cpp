#include "ops/embedding.h"

#include "ops/op_tools.h"

namespace marrow {
namespace {

void check_ids(const at::Tensor& ids, const Parameter& weight) {
  check_tensor("embedding: ids", ids, at::kInt, {-1});
  if (!ids.is_cpu()) return;
  const int32_t* id = ints(ids);
  const int64_t vocabulary = weight.value.size(0);
  for (int64_t t = 0; t < ids.size(0); ++t) {
    MARROW_CHECK(id[t] >= 0 && id[t] < vocabulary, ExitCode::kBadInput,
                 Fix("tokenize the corpus with this model's tokenizer (marrow tokenize)"),
                 "token id {} at position {} is outside of {}'s {} rows", id[t], t, weight.name, vocabulary);
  }
}

}  // namespace

Tensor embedding_forward(const Tensor& ids, const Parameter& weight) {
  check_ids(ids, weight);
  const Tensor table = weight.value.detach().contiguous();
  if (ids.is_cpu()) return at::index_select(table, 0, ids);
  const Tensor out = at::empty({ids.size(0), table.size(1)}, table.options());
  MARROW_CUDA_CALL(gather_rows_cuda(table, ids, View(), out));
  return out;
}

void embedding_backward(const Tensor& ids, const Tensor& d_out, const Parameter& weight, bool deterministic) {
  if (!weight.grad.defined() || ids.numel() == 0) return;
  check_ids(ids, weight);
  const Tensor rows = d_out.detach().contiguous();
  if (ids.is_cuda() && !deterministic) {
    MARROW_CUDA_CALL(embedding_backward_cuda(ids, rows, weight.grad));
    return;
  }
  if (ids.is_cuda()) {
    const auto [sorted, position] = at::sort(ids, /*stable=*/true, 0, /*descending=*/false);
    MARROW_CUDA_CALL(embedding_backward_sorted_cuda(sorted, position, rows, weight.grad));
    return;
  }
  const Tensor rows32 = rows.to(at::kFloat);
  const int32_t* id = ints(ids);
  const int64_t hidden = rows.size(1);
  // Threads share out columns, so that each sum runs in token order for any number of threads.
  at::parallel_for(0, hidden, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < ids.size(0); ++t) {
      float* target = floats(weight.grad) + id[t] * hidden;
      const float* row = floats(rows32) + t * hidden;
#pragma omp simd
      for (int64_t c = begin; c < end; ++c) target[c] += row[c];
    }
  });
}

}  // namespace marrow
