#include "ops/attention_kernels.h"

#include "ops/cpu_math.h"
#include "ops/device.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

// Rows: a unit of work is a segment and a key/value head. Its query rows, (token, head of the group) in this order, go
// in blocks of matrix products; a block multiplies only the keys that some row of it sees.
constexpr int64_t kBlockRows = 128;

// [T, H, D] → contiguous fp32 [Hkv, T, H / Hkv, D], and back in `dtype`.
Tensor by_kv_head(const Tensor& x, int64_t kv_heads) {
  return x.unflatten(1, {kv_heads, -1}).transpose(0, 1).to(at::kFloat).contiguous();
}

Tensor by_token(const Tensor& x, at::ScalarType dtype) {
  return x.transpose(0, 1).to(dtype).contiguous().flatten(1, 2);
}

// Query rows of some tokens of a segment, and the keys that some of them see. first_row and first_key
// are rows of the [Hkv, T, …] tensors; begins and ends are the tokens' keys, counted as `origin` is.
struct Block {
  int64_t first_row, rows, first_key, keys;
  int64_t group, origin;
  const int64_t *begins, *ends;

  // Zeros what query row `row` of `scores` [keys] must not see; returns the visible part's place.
  std::pair<int64_t, int64_t> visible_part(int64_t row, float* scores) const {
    const int64_t begin = begins[row / group] - origin, end = ends[row / group] - origin;
    std::fill(scores, scores + begin, 0.0f);
    std::fill(scores + end, scores + keys, 0.0f);
    return {begin, end - begin};
  }
};

// Runs work(block, scratch, scratch), each scratch for rows · keys, for all blocks; a unit's in order, by one thread.
template <typename Work>
void for_blocks(const RowAttention& attention, const Tensor& q, const Tensor& k, const Work& work) {
  const int64_t kv_heads = q.size(0), group = q.size(2);
  const auto segments = static_cast<int64_t>(attention.segments.size()) - 1;
  const int64_t step = std::max<int64_t>(1, kBlockRows / group);  // tokens of a block
  const std::vector<int64_t>&begins = attention.first_key, &ends = attention.end_key;
  at::parallel_for(0, segments * kv_heads, 1, [&](int64_t unit_begin, int64_t unit_end) {
    for (int64_t unit = unit_begin; unit < unit_end; ++unit) {
      const int64_t start = attention.segments[unit / kv_heads], head = unit % kv_heads;
      const int64_t stop = attention.segments[unit / kv_heads + 1];
      if (start == stop) continue;
      std::vector<float> scores(step * group * (ends[stop - 1] - begins[start])), d_scores(scores.size());
      for (int64_t first = start; first < stop; first += step) {
        const int64_t last = std::min(stop, first + step), origin = begins[first];
        work(Block{(head * q.size(1) + first) * group, (last - first) * group, head * k.size(1) + origin,
                   ends[last - 1] - origin, group, origin, begins.data() + first, ends.data() + first},
             scores.data(), d_scores.data());
      }
    }
  });
}

// ATen's flash backward is deterministic only where the process says so.
class DeterministicScope {
 public:
  explicit DeterministicScope(bool wanted)
      : before_(at::globalContext().deterministicAlgorithms()),
        warn_only_(at::globalContext().deterministicAlgorithmsWarnOnly()) {
    if (wanted) at::globalContext().setDeterministicAlgorithms(true, false);
  }
  ~DeterministicScope() { at::globalContext().setDeterministicAlgorithms(before_, warn_only_); }
  DeterministicScope(const DeterministicScope&) = delete;
  DeterministicScope& operator=(const DeterministicScope&) = delete;

 private:
  bool before_;
  bool warn_only_;
};

// What flash takes: flattened tokens with offsets where there are pieces, else [B, S].
struct FlashArguments {
  std::optional<Tensor> offsets;
  std::optional<int64_t> left, right;

  explicit FlashArguments(const GpuAttention& attention) {
    if (attention.pieces.defined()) offsets = attention.pieces;
    if (attention.left < 0) return;
    left = attention.left;
    if (attention.causal) right = 0;
  }
  Tensor in(const Tensor& x) const { return offsets ? x.squeeze(0) : x; }
  Tensor out(const Tensor& x) const { return offsets ? x.unsqueeze(0) : x; }
  int64_t rows(const GpuAttention& attention, const Tensor& x) const { return offsets ? attention.longest : x.size(1); }
};

// Flash wants values as wide as keys: zeros make up for it, and give columns of zeros in the output.
Tensor as_wide(const Tensor& x, const Tensor& q) {
  return x.size(-1) == q.size(-1) ? x : at::constant_pad_nd(x, {0, q.size(-1) - x.size(-1)});
}

// cuDNN's entry takes [B, H, S, D].
Tensor heads_first(const Tensor& x) { return x.transpose(1, 2); }

}  // namespace

std::pair<Tensor, Tensor> attention_rows_forward(const RowAttention& attention, const Tensor& q, const Tensor& k,
                                                 const Tensor& v) {
  if (!q.is_cpu()) {
    const auto [out, lse] = attention_rows_forward(attention, q.cpu(), k.cpu(), v.cpu());
    return {out.to(q.device()), lse.to(q.device())};
  }
  const int64_t kv_heads = k.size(1), size = q.size(2), value_size = v.size(2);
  const Tensor queries = by_kv_head(q, kv_heads).mul(attention.scale);
  const Tensor keys = by_kv_head(k, kv_heads), values = by_kv_head(v, kv_heads);
  const Tensor out = at::empty({kv_heads, q.size(0), queries.size(2), value_size});
  const Tensor lse = at::empty({kv_heads, q.size(0), queries.size(2)});
  for_blocks(attention, queries, keys, [&](const Block& block, float* scores, float*) {
    const int64_t n = block.keys, rows = block.rows;
    float* results = floats(out) + block.first_row * value_size;
    sgemm(false, true, rows, n, size, floats(queries) + block.first_row * size, size,
          floats(keys) + block.first_key * size, size, 0, scores, n);
    std::vector<float> inverse(rows);
    for (int64_t row = 0; row < rows; ++row) {
      const auto [begin, count] = block.visible_part(row, scores + row * n);
      float* visible = scores + row * n + begin;
      const float most = max_of_row(visible, count);
      const float sum = exp_row(visible, count, most);
      floats(lse)[block.first_row + row] = most + std::log(sum);
      inverse[row] = count > 0 ? 1.0f / sum : 0.0f;
    }
    sgemm(false, false, rows, value_size, n, scores, n, floats(values) + block.first_key * value_size, value_size, 0,
          results, value_size);
    for (int64_t row = 0; row < rows; ++row) {
      float* result = results + row * value_size;
      for (int64_t c = 0; c < value_size; ++c) result[c] *= inverse[row];
    }
  });
  return {by_token(out, q.scalar_type()), lse};
}

std::array<Tensor, 3> attention_rows_backward(const RowAttention& attention, const Tensor& q, const Tensor& k,
                                              const Tensor& v, const Tensor& out, const Tensor& lse,
                                              const Tensor& d_out) {
  if (!q.is_cpu()) {
    auto gradients = attention_rows_backward(attention, q.cpu(), k.cpu(), v.cpu(), out.cpu(), lse.cpu(), d_out.cpu());
    for (Tensor& gradient : gradients) gradient = gradient.to(q.device());
    return gradients;
  }
  const int64_t kv_heads = k.size(1), size = q.size(2), value_size = v.size(2);
  const Tensor queries = by_kv_head(q, kv_heads).mul(attention.scale);
  const Tensor keys = by_kv_head(k, kv_heads), values = by_kv_head(v, kv_heads);
  const Tensor d_results = by_kv_head(d_out, kv_heads);
  const Tensor deltas = (d_results * by_kv_head(out, kv_heads)).sum(-1);  // [Hkv, T, group]
  const at::ScalarType dtype = q.scalar_type();
  const Tensor dq = at::empty_like(queries), dk = at::zeros_like(keys), dv = at::zeros_like(values);
  for_blocks(attention, queries, keys, [&](const Block& block, float* scores, float* d_scores) {
    const int64_t n = block.keys, rows = block.rows;
    const float* block_queries = floats(queries) + block.first_row * size;
    const float* block_keys = floats(keys) + block.first_key * size;
    const float* grads = floats(d_results) + block.first_row * value_size;
    sgemm(false, true, rows, n, size, block_queries, size, block_keys, size, 0, scores, n);
    sgemm(false, true, rows, n, value_size, grads, value_size, floats(values) + block.first_key * value_size,
          value_size, 0, d_scores, n);
    for (int64_t row = 0; row < rows; ++row) {
      float *p = scores + row * n, *ds = d_scores + row * n;
      const auto [begin, count] = block.visible_part(row, p);
      exp_row(p + begin, count, floats(lse)[block.first_row + row]);
      const float delta = floats(deltas)[block.first_row + row];
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) ds[c] = p[c] * (ds[c] - delta);
    }
    sgemm(true, false, n, value_size, rows, scores, n, grads, value_size, 1, floats(dv) + block.first_key * value_size,
          value_size);
    sgemm(true, false, n, size, rows, d_scores, n, block_queries, size, 1, floats(dk) + block.first_key * size, size);
    sgemm(false, false, rows, size, n, d_scores, n, block_keys, size, 0, floats(dq) + block.first_row * size, size);
  });
  return {by_token(dq.mul_(attention.scale), dtype), by_token(dk, dtype), by_token(dv, dtype)};
}

void merge_sinks(const Tensor& sinks, const Tensor& out, const Tensor& lse) {
  const Tensor merged = at::logaddexp(lse, sinks.to(at::kFloat));
  Tensor(out).mul_(lse.sub(merged).exp_().unsqueeze(-1));
  lse.copy_(merged);
}

void add_sink_gradient(const Tensor& grad, const Tensor& sinks, const Tensor& out, const Tensor& lse,
                       const Tensor& d_out) {
  const Tensor deltas = (d_out.to(at::kFloat) * out).sum(-1), share = at::exp(sinks.to(at::kFloat) - lse);
  Tensor(grad).sub_(deltas.mul_(share).reshape({-1, grad.numel()}).sum(0));
}

void GpuAttention::set_pieces(const std::vector<int32_t>& offsets, at::Device device) {
  longest = 1;
  for (size_t i = 1; i < offsets.size(); ++i) longest = std::max<int64_t>(longest, offsets[i] - offsets[i - 1]);
  pieces = to_device(offsets, device);
}

bool needs_flash(const Tensor& q, const Tensor& v, bool masked, bool deterministic) {
  if (!masked && !deterministic) return false;
  MARROW_CHECK(q.size(2) >= v.size(2) && q.size(2) % 8 == 0 && q.size(2) <= 256, ExitCode::kUsage,
               Fix("set data.mask_documents = false and train.deterministic = false"),
               "attention with documents, a window or determinism on the GPU needs a head size of q and k that is a "
               "multiple of 8 up to 256, and v's no larger; they are {} and {}",
               q.size(2), v.size(2));
  return true;
}

variable_list attention_gpu_forward(const GpuAttention& attention, const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!attention.flash) {
    const auto result = at::_scaled_dot_product_cudnn_attention(heads_first(q), heads_first(k), heads_first(v), {},
                                                                attention.backward, 0.0, attention.causal,
                                                                /*return_debug_mask=*/false, attention.scale);
    const Tensor& lse = std::get<1>(result);
    return {heads_first(std::get<0>(result)), lse.defined() && lse.dim() == 4 ? lse.squeeze(3) : lse,
            std::get<6>(result), std::get<7>(result)};
  }
  const FlashArguments flash(attention);
  const auto result =
      at::_flash_attention_forward(flash.in(q), flash.in(k), flash.in(as_wide(v, q)), flash.offsets, flash.offsets,
                                   flash.rows(attention, q), flash.rows(attention, k), 0.0, attention.causal,
                                   /*return_debug_mask=*/false, attention.scale, flash.left, flash.right);
  const Tensor out = flash.out(std::get<0>(result)).narrow(-1, 0, v.size(-1)).contiguous();
  return {out, flash.out(std::get<1>(result)), std::get<2>(result), std::get<3>(result)};
}

std::array<Tensor, 3> attention_gpu_backward(const GpuAttention& attention, const variable_list& saved,
                                             const Tensor& d_out) {
  const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
  if (!attention.flash) {
    const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        heads_first(d_out), heads_first(q), heads_first(k), heads_first(v), heads_first(out), lse.unsqueeze(3),
        saved[5], saved[6], {}, {}, {}, q.size(1), k.size(1), 0.0, attention.causal, attention.scale);
    return {heads_first(dq), heads_first(dk), heads_first(dv)};
  }
  const FlashArguments flash(attention);
  const DeterministicScope scope(attention.deterministic);
  const Tensor offsets = flash.offsets.value_or(Tensor());
  const auto [dq, dk, dv] = at::_flash_attention_backward(
      flash.in(as_wide(d_out, q)), flash.in(q), flash.in(k), flash.in(as_wide(v, q)), flash.in(as_wide(out, q)),
      flash.in(lse), offsets, offsets, flash.rows(attention, q), flash.rows(attention, k), 0.0, attention.causal,
      saved[5], saved[6], attention.scale, flash.left, flash.right);
  return {flash.out(dq), flash.out(dk), flash.out(dv).narrow(-1, 0, v.size(-1))};
}

}  // namespace marrow
