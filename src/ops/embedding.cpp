#include "ops/pch.h"
// After the precompiled header:
#include "ops/cpu_loops.h"
#include "ops/cuda_launch.h"
#include "ops/embedding.h"
#include "ops/embedding_cuda.h"

namespace marrow {
namespace {

void check_ids(const at::Tensor& ids, const Parameter& weight) {
  MARROW_CHECK(ids.dim() == 1 && ids.scalar_type() == at::kInt && ids.is_contiguous(),
               ExitCode::kUsage, Fix("pass token ids as a contiguous int32 vector"),
               "embedding: ids are {} with {} dimensions", c10::toString(ids.scalar_type()),
               ids.dim());
  if (!ids.is_cpu()) return;
  const int32_t* id = ids.const_data_ptr<int32_t>();
  const int64_t vocabulary = weight.value.size(0);
  for (int64_t t = 0; t < ids.size(0); ++t) {
    MARROW_CHECK(id[t] >= 0 && id[t] < vocabulary, ExitCode::kBadInput,
                 Fix("tokenize the corpus with this model's tokenizer (marrow tokenize)"),
                 "token id {} at position {} is outside of {}'s {} rows", id[t], t, weight.name,
                 vocabulary);
  }
}

}  // namespace

at::Tensor embedding_forward(const at::Tensor& ids, const Parameter& weight) {
  check_ids(ids, weight);
  const at::Tensor table = weight.value.detach().contiguous();
  const int64_t row_bytes = table.size(1) * static_cast<int64_t>(table.element_size());
  at::Tensor out = at::empty({ids.size(0), table.size(1)}, table.options());
  if (out.numel() == 0) return out;
  const int32_t* id = ids.const_data_ptr<int32_t>();
  if (ids.is_cuda()) {
    MARROW_CUDA_CALL(embedding_forward_cuda(id, table.const_data_ptr(), out.data_ptr(), ids.size(0),
                                            row_bytes, current_cuda_stream()));
    return out;
  }
  const auto* source = static_cast<const char*>(table.const_data_ptr());
  auto* target = static_cast<char*>(out.data_ptr());
  at::parallel_for(0, ids.size(0), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::copy_n(source + id[t] * row_bytes, row_bytes, target + t * row_bytes);
    }
  });
  return out;
}

void embedding_backward(const at::Tensor& ids, const at::Tensor& d_out, const Parameter& weight,
                        bool deterministic) {
  if (!weight.grad.defined() || ids.numel() == 0) return;
  check_ids(ids, weight);
  const at::Tensor rows = d_out.detach().contiguous();
  const int64_t tokens = ids.size(0);
  const int64_t hidden = rows.size(1);
  float* grad = weight.grad.data_ptr<float>();
  if (ids.is_cuda()) {
    const bool bf16 = rows.scalar_type() == at::kBFloat16;
    if (!deterministic) {
      MARROW_CUDA_CALL(embedding_backward_cuda(ids.const_data_ptr<int32_t>(), rows.const_data_ptr(),
                                               bf16, grad, tokens, hidden, current_cuda_stream()));
      return;
    }
    const auto [sorted, position] = at::sort(ids, /*stable=*/true, 0, /*descending=*/false);
    MARROW_CUDA_CALL(embedding_backward_sorted_cuda(
        sorted.const_data_ptr<int32_t>(), position.const_data_ptr<int64_t>(), rows.const_data_ptr(),
        bf16, grad, tokens, hidden, current_cuda_stream()));
    return;
  }
  const int32_t* id = ids.const_data_ptr<int32_t>();
  dispatch_working_dtype(rows.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* source = rows.const_data_ptr<T>();
    // Threads share out columns, so that each sum runs in token order for any number of threads.
    at::parallel_for(0, hidden, 64, [&](int64_t begin, int64_t end) {
      for (int64_t t = 0; t < tokens; ++t) {
        float* target = grad + id[t] * hidden;
        const T* row = source + t * hidden;
#pragma omp simd
        for (int64_t c = begin; c < end; ++c) target[c] += static_cast<float>(row[c]);
      }
    });
  });
}

}  // namespace marrow
