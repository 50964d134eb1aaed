#include "ops/attention.h"

#include "ops/attention_kernels.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

RowAttention visible_rows(const AttentionLayout& layout, double scale) {
  RowAttention rows{segments_of(layout), {}, {}, scale};
  for (size_t i = 1; i < rows.segments.size(); ++i) {
    for (int64_t t = rows.segments[i - 1]; t < rows.segments[i]; ++t) {
      const int64_t first = layout.window == 0 ? 0 : t - layout.window + 1;
      rows.first_key.push_back(std::max(rows.segments[i - 1], first));
      rows.end_key.push_back(t + 1);
    }
  }
  return rows;
}

GpuAttention gpu_attention(const Tensor& q, const Tensor& v, const AttentionLayout& layout, double scale,
                           bool deterministic) {
  const bool documents = !layout.document_offsets.empty();
  GpuAttention gpu;
  gpu.scale = scale;
  // cuDNN's backward refuses a single query and key.
  gpu.flash = needs_flash(q, v, documents || layout.window > 0 || layout.seq_len == 1, deterministic);
  gpu.deterministic = deterministic;
  gpu.left = layout.window - 1;
  if (documents) gpu.set_pieces(layout.document_offsets, q.device());
  return gpu;
}

Tensor with_dense_rows(const Tensor& x) { return x.stride(-1) == 1 ? x.detach() : x.detach().contiguous(); }

}  // namespace

std::vector<int64_t> segments_of(const AttentionLayout& layout) {
  if (!layout.document_offsets.empty()) return {layout.document_offsets.begin(), layout.document_offsets.end()};
  std::vector<int64_t> offsets;
  for (int64_t s = 0; s <= layout.sequences; ++s) offsets.push_back(s * layout.seq_len);
  return offsets;
}

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionLayout& layout, int64_t ranks) {
  MARROW_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && q.size(2) == k.size(2) && k.size(1) == v.size(1) &&
                   k.size(1) > 0 && q.size(1) % k.size(1) == 0 && k.size(0) == q.size(0) && v.size(0) == q.size(0),
               ExitCode::kUsage, Fix("set num_attention_heads in config.json to a multiple of num_key_value_heads"),
               "attention: q {}, k {}, v {}", c10::str(q.sizes()), c10::str(k.sizes()), c10::str(v.sizes()));
  const int64_t tokens = layout.sequences * layout.seq_len;
  MARROW_CHECK(tokens == q.size(0) * ranks && layout.window >= 0, ExitCode::kUsage,
               Fix("describe the micro-batch's tokens in AttentionLayout"),
               "attention: {} tokens, layout of {} sequences of {}, window {}", q.size(0) * ranks, layout.sequences,
               layout.seq_len, layout.window);
  const auto& offsets = layout.document_offsets;
  if (offsets.empty()) return;
  const bool ascending = std::is_sorted(offsets.begin(), offsets.end());
  MARROW_CHECK(offsets.front() == 0 && offsets.back() == tokens && ascending, ExitCode::kUsage,
               Fix("give cumulative document offsets from 0 to the number of tokens"),
               "attention: document offsets from {} to {} for {} tokens, {}", offsets.front(), offsets.back(), tokens,
               ascending ? "ascending" : "not ascending");
  for (int64_t s = 0; s < layout.sequences; ++s) {
    MARROW_CHECK(std::binary_search(offsets.begin(), offsets.end(), s * layout.seq_len), ExitCode::kUsage,
                 Fix("start a document at each sequence"),
                 "attention: no document starts at token {}, where sequence {} does", s * layout.seq_len, s);
  }
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionLayout& layout, double scale,
                 bool deterministic, const Parameter& sinks) {
  check_attention(q, k, v, layout);
  const bool sinking = sinks.value.defined();
  if (sinking) check_tensor(sinks.name, sinks.value, q.scalar_type(), {q.size(1)}, q.device());
  variable_list kept{with_dense_rows(q), with_dense_rows(k), with_dense_rows(v)};
  if (q.is_cpu() || q.scalar_type() == at::kFloat || q.numel() == 0) {
    const RowAttention rows = visible_rows(layout, scale);
    const auto [out, lse] = attention_rows_forward(rows, kept[0], kept[1], kept[2]);
    // By key/value head, as lse is.
    const auto by_group = [heads = k.size(1)](const Tensor& x, int64_t dim) { return x.unflatten(dim, {heads, -1}); };
    if (sinking) merge_sinks(by_group(sinks.value, 0), by_group(out, 1), lse.transpose(0, 1));
    return differentiable({q, k, v}, {out}, [=, lse = lse, out = out](const variable_list& d_out) -> variable_list {
      if (sinks.grad.defined()) {
        add_sink_gradient(sinks.grad, by_group(sinks.value, 0), by_group(out, 1), lse.transpose(0, 1),
                          by_group(d_out[0], 1));
      }
      const auto [dq, dk, dv] =
          attention_rows_backward(rows, kept[0], kept[1], kept[2], out, lse, d_out[0].contiguous());
      return {dq, dk, dv};
    })[0];
  }
  GpuAttention gpu = gpu_attention(q, v, layout, scale, deterministic);
  // With sinks for the log-sum-exp alone.
  gpu.backward =
      sinking || (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad()));
  const int64_t batch = layout.document_offsets.empty() ? layout.sequences : 1;  // of the kernels' [B, S]
  const auto batched = [batch](const Tensor& x) { return x.unflatten(0, {batch, -1}); };
  for (Tensor& x : kept) x = batched(x);
  const variable_list results = attention_gpu_forward(gpu, kept[0], kept[1], kept[2]);
  if (sinking) merge_sinks(sinks.value, results[0], results[1].transpose(1, 2));
  kept.insert(kept.end(), results.begin(), results.end());
  return differentiable({q, k, v}, {results[0].flatten(0, 1)}, [=](const variable_list& d_out) -> variable_list {
    if (sinks.grad.defined()) {
      add_sink_gradient(sinks.grad, sinks.value, kept[3], kept[4].transpose(1, 2), batched(d_out[0]));
    }
    const auto [dq, dk, dv] = attention_gpu_backward(gpu, kept, batched(d_out[0].contiguous()));
    return {dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)};
  })[0];
}

}  // namespace marrow
