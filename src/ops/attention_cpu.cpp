#include "ops/attention_cpu.h"

#include "ops/cpu_loops.h"

// A unit of work is a segment and a key/value head. Its query rows go in blocks that fold the
// group's heads into the rows of a matrix product; a block multiplies only the keys that some row
// of it sees.
namespace marrow {
namespace {

constexpr int64_t kBlockRows = 128;  // of the products: tokens · heads of the group

// A strided [T, H, D] tensor.
template <typename T>
struct Heads {
  T* data;
  int64_t token_stride, head_stride, size;

  T* row(int64_t token, int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

template <typename T>
Heads<T> heads_of(const at::Tensor& tensor) {
  return {static_cast<T*>(const_cast<void*>(tensor.const_data_ptr())), tensor.stride(0),
          tensor.stride(1), tensor.size(2)};
}

template <typename T>
void gather_row(const T* from, float* to, int64_t size, float scale) {
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) to[c] = static_cast<float>(from[c]) * scale;
}

template <typename T>
void scatter_row(const float* from, T* to, int64_t size, float scale) {
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) to[c] = static_cast<T>(from[c] * scale);
}

// values = exp(values − shift); returns their sum.
float exp_row(float* values, int64_t size, float shift) {
  __m256 sums = _mm256_setzero_ps();
  int64_t c = 0;
  for (; c + 8 <= size; c += 8) {
    const __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(values + c), _mm256_set1_ps(shift)));
    _mm256_storeu_ps(values + c, e);
    sums = _mm256_add_ps(sums, e);
  }
  float sum = sum8(sums);
  if (c == size) return sum;
  store8(values + c, exp8(_mm256_sub_ps(load8(values + c, size - c), _mm256_set1_ps(shift))),
         size - c);
  for (; c < size; ++c) sum += values[c];
  return sum;
}

float max_of_row(const float* values, int64_t size) {
  __m256 most = _mm256_set1_ps(-INFINITY);
  int64_t c = 0;
  for (; c + 8 <= size; c += 8) most = _mm256_max_ps(most, _mm256_loadu_ps(values + c));
  float result = max8(most);
  for (; c < size; ++c) result = std::max(result, values[c]);
  return result;
}

// A block of query rows [first, last) of a segment that starts at `start`, and the keys
// [first_key, last) that they may see; all are token indices.
struct Block {
  int64_t start, first, last, window, group;

  int64_t first_key() const { return lowest_key(first); }
  int64_t keys() const { return last - first_key(); }
  int64_t rows() const { return (last - first) * group; }
  int64_t lowest_key(int64_t token) const {
    return window == 0 ? start : std::max(start, token - window + 1);
  }
};

// Calls visit(token, head in the group, row of the block).
template <typename Visit>
void for_rows(const Block& block, Visit&& visit) {
  int64_t row = 0;
  for (int64_t token = block.first; token < block.last; ++token) {
    for (int64_t head = 0; head < block.group; ++head) visit(token, head, row++);
  }
}

// Zeros what row `token` of `scores` [keys] must not see, and returns the visible part's place.
std::pair<int64_t, int64_t> visible_part(const Block& block, int64_t token, float* scores) {
  const int64_t begin = block.lowest_key(token) - block.first_key();
  const int64_t end = token + 1 - block.first_key();
  std::fill(scores, scores + begin, 0.0f);
  std::fill(scores + end, scores + block.keys(), 0.0f);
  return {begin, end - begin};
}

template <typename T>
std::vector<float> gather_segment(const Heads<T>& from, int64_t start, int64_t end, int64_t head) {
  std::vector<float> rows((end - start) * from.size);
  for (int64_t t = start; t < end; ++t) {
    gather_row(from.row(t, head), rows.data() + (t - start) * from.size, from.size, 1.0f);
  }
  return rows;
}

// Runs work(segment start, segment end, kv head) for all of them on all threads.
template <typename Work>
void for_segments(const CpuAttention& attention, int64_t kv_heads, Work&& work) {
  const auto segments = static_cast<int64_t>(attention.segments.size()) - 1;
  at::parallel_for(0, segments * kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t segment = unit / kv_heads;
      work(attention.segments[segment], attention.segments[segment + 1], unit % kv_heads);
    }
  });
}

template <typename Work>
void for_blocks(const CpuAttention& attention, int64_t start, int64_t end, int64_t group,
                Work&& work) {
  const int64_t tokens = std::max<int64_t>(1, kBlockRows / group);
  for (int64_t first = start; first < end; first += tokens) {
    work(Block{start, first, std::min(end, first + tokens), attention.window, group});
  }
}

template <typename T>
void forward(const CpuAttention& attention, const Heads<T>& q, const Heads<T>& k, const Heads<T>& v,
             const Heads<T>& out, float* lse, int64_t q_heads, int64_t kv_heads) {
  const int64_t group = q_heads / kv_heads;
  const auto scale = static_cast<float>(attention.scale);
  for_segments(attention, kv_heads, [&](int64_t start, int64_t end, int64_t kv_head) {
    const std::vector<float> keys = gather_segment(k, start, end, kv_head);
    const std::vector<float> values = gather_segment(v, start, end, kv_head);
    const int64_t most_rows = std::max(kBlockRows, group);
    std::vector<float> queries(most_rows * q.size), scores(most_rows * (end - start));
    std::vector<float> results(most_rows * v.size), sums(most_rows);
    for_blocks(attention, start, end, group, [&](const Block& block) {
      const int64_t n = block.keys();
      const float* block_keys = keys.data() + (block.first_key() - start) * k.size;
      const float* block_values = values.data() + (block.first_key() - start) * v.size;
      for_rows(block, [&](int64_t token, int64_t head, int64_t row) {
        gather_row(q.row(token, kv_head * group + head), queries.data() + row * q.size, q.size,
                   scale);
      });
      sgemm(false, true, block.rows(), n, q.size, queries.data(), q.size, block_keys, k.size, 0,
            scores.data(), n);
      for_rows(block, [&](int64_t token, int64_t head, int64_t row) {
        float* row_scores = scores.data() + row * n;
        const auto [begin, count] = visible_part(block, token, row_scores);
        const float most = max_of_row(row_scores + begin, count);
        sums[row] = exp_row(row_scores + begin, count, most);
        lse[token * q_heads + kv_head * group + head] = most + std::log(sums[row]);
      });
      sgemm(false, false, block.rows(), v.size, n, scores.data(), n, block_values, v.size, 0,
            results.data(), v.size);
      for_rows(block, [&](int64_t token, int64_t head, int64_t row) {
        scatter_row(results.data() + row * v.size, out.row(token, kv_head * group + head), v.size,
                    1.0f / sums[row]);
      });
    });
  });
}

template <typename T>
struct BackwardHeads {
  Heads<T> q, k, v, out, d_out, dq, dk, dv;
};

template <typename T>
void backward(const CpuAttention& attention, const BackwardHeads<T>& heads, const float* lse,
              int64_t q_heads, int64_t kv_heads) {
  const auto& [q, k, v, out, d_out, dq, dk, dv] = heads;
  const int64_t group = q_heads / kv_heads;
  const auto scale = static_cast<float>(attention.scale);
  const int64_t size = q.size;
  const int64_t value_size = v.size;
  for_segments(attention, kv_heads,
               [&, &q = q, &k = k, &v = v, &out = out, &d_out = d_out, &dq = dq, &dk = dk,
                &dv = dv](int64_t start, int64_t end, int64_t kv_head) {
                 const std::vector<float> keys = gather_segment(k, start, end, kv_head);
                 const std::vector<float> values = gather_segment(v, start, end, kv_head);
                 std::vector<float> d_keys(keys.size()), d_values(values.size());
                 const int64_t most_rows = std::max(kBlockRows, group);
                 std::vector<float> queries(most_rows * size), d_results(most_rows * value_size);
                 std::vector<float> scores(most_rows * (end - start)), d_scores(scores.size()),
                     deltas(most_rows);
                 for_blocks(attention, start, end, group, [&](const Block& block) {
                   const int64_t n = block.keys();
                   const int64_t rows = block.rows();
                   const int64_t first_key = block.first_key() - start;
                   const float* block_keys = keys.data() + first_key * size;
                   for_rows(block, [&](int64_t token, int64_t head, int64_t row) {
                     const int64_t h = kv_head * group + head;
                     gather_row(q.row(token, h), queries.data() + row * size, size, scale);
                     gather_row(d_out.row(token, h), d_results.data() + row * value_size,
                                value_size, 1.0f);
                     const T* result = out.row(token, h);
                     const float* grad = d_results.data() + row * value_size;
                     float delta = 0;
#pragma omp simd reduction(+ : delta)
                     for (int64_t c = 0; c < value_size; ++c)
                       delta += grad[c] * static_cast<float>(result[c]);
                     deltas[row] = delta;
                   });
                   sgemm(false, true, rows, n, size, queries.data(), size, block_keys, size, 0,
                         scores.data(), n);
                   sgemm(false, true, rows, n, value_size, d_results.data(), value_size,
                         values.data() + first_key * value_size, value_size, 0, d_scores.data(), n);
                   for_rows(block, [&](int64_t token, int64_t head, int64_t row) {
                     float* p = scores.data() + row * n;
                     float* ds = d_scores.data() + row * n;
                     const auto [begin, count] = visible_part(block, token, p);
                     exp_row(p + begin, count, lse[token * q_heads + kv_head * group + head]);
                     const float delta = deltas[row];
#pragma omp simd
                     for (int64_t c = 0; c < n; ++c) ds[c] = p[c] * (ds[c] - delta);
                   });
                   sgemm(true, false, n, value_size, rows, scores.data(), n, d_results.data(),
                         value_size, 1, d_values.data() + first_key * value_size, value_size);
                   sgemm(true, false, n, size, rows, d_scores.data(), n, queries.data(), size, 1,
                         d_keys.data() + first_key * size, size);
                   sgemm(false, false, rows, size, n, d_scores.data(), n, block_keys, size, 0,
                         queries.data(), size);
                   for_rows(block, [&](int64_t token, int64_t head, int64_t row) {
                     scatter_row(queries.data() + row * size, dq.row(token, kv_head * group + head),
                                 size, scale);
                   });
                 });
                 for (int64_t t = start; t < end; ++t) {
                   scatter_row(d_keys.data() + (t - start) * size, dk.row(t, kv_head), size, 1.0f);
                   scatter_row(d_values.data() + (t - start) * value_size, dv.row(t, kv_head),
                               value_size, 1.0f);
                 }
               });
}

}  // namespace

void attention_forward_cpu(const CpuAttention& attention, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse) {
  dispatch_working_dtype(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    forward<T>(attention, heads_of<T>(q), heads_of<T>(k), heads_of<T>(v), heads_of<T>(out),
               lse.data_ptr<float>(), q.size(1), k.size(1));
  });
}

void attention_backward_cpu(const CpuAttention& attention, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                            const at::Tensor& d_out, const at::Tensor& dq, const at::Tensor& dk,
                            const at::Tensor& dv) {
  dispatch_working_dtype(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    backward<T>(attention,
                {heads_of<T>(q), heads_of<T>(k), heads_of<T>(v), heads_of<T>(out),
                 heads_of<T>(d_out), heads_of<T>(dq), heads_of<T>(dk), heads_of<T>(dv)},
                lse.const_data_ptr<float>(), q.size(1), k.size(1));
  });
}

}  // namespace marrow
