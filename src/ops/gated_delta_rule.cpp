#include "ops/gated_delta_rule.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

// X · op(M) = B for X, column-major, in the place of B; M triangular.
extern "C" void strsm_(const char* side, const char* triangle, const char* transpose, const char* diagonal,
                       const int* m, const int* n, const float* alpha, const float* a, const int* lda, float* b,
                       const int* ldb);

namespace marrow {
namespace {

constexpr int64_t kChunk = 32;  // 64 was slower, by a fifth backward

struct Inputs {
  Tensor q, k, v, g, beta, starts, initial;

  int64_t tokens() const { return q.size(0); }
  int64_t key_heads() const { return q.size(1); }
  int64_t key_size() const { return q.size(2); }
  int64_t value_heads() const { return v.size(1); }
  int64_t value_size() const { return v.size(2); }
  int64_t segments() const { return starts.size(0) - 1; }
  int64_t state_size() const { return key_size() * value_size(); }
};

float dot(const float* a, const float* b, int64_t size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// to = factor · from, row by row; `stride` is that of `from`, `to` is dense.
template <typename Factor>
void scale_rows(const float* from, int64_t stride, float* to, int64_t rows, int64_t size, const Factor& factor) {
  for (int64_t i = 0; i < rows; ++i) {
    const float f = factor(i);
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) to[i * size + c] = f * from[i * stride + c];
  }
}

// Up to kChunk consecutive tokens of a value head, all fp32, q and k scaled to their lengths. With G_i the sum of g up
// to row i, and S the state before the chunk, the state after row i is e^G_i S + Σ_{j ≤ i} e^(G_i − G_j) k_j u_jᵀ,
// where (I + A) U = β (V − e^G K S).
struct Chunk {
  int64_t rows, dk, dv, key_stride, value_stride, gate_stride;
  const float *q, *k, *v, *beta;
  float decay[kChunk * kChunk];  // e^(G_i − G_j) for j ≤ i, else 0
  float a[kChunk * kChunk];      // A: β_i decay_ij k_i·k_j for j < i, else 0
  float entry[kChunk];           // e^G_i

  Chunk(const Inputs& in, int64_t first, int64_t count, int64_t head) : rows(count) {
    dk = in.key_size(), dv = in.value_size(), gate_stride = in.value_heads();
    key_stride = in.key_heads() * dk, value_stride = gate_stride * dv;
    const int64_t key_at = first * key_stride + head / (gate_stride / in.key_heads()) * dk;
    q = floats(in.q) + key_at, k = floats(in.k) + key_at, v = floats(in.v) + first * value_stride + head * dv;
    beta = floats(in.beta) + first * gate_stride + head;
    const float* g = floats(in.g) + first * gate_stride + head;
    double sums[kChunk], sum = 0;  // differences of large sums must keep a small g
    for (int64_t i = 0; i < rows; ++i) {
      sums[i] = sum += g[i * gate_stride];
      entry[i] = static_cast<float>(std::exp(sum));
      float* row = decay + i * rows;
      for (int64_t j = 0; j <= i; ++j) row[j] = static_cast<float>(sums[i] - sums[j]);
      exp_row(row, i + 1, 0.0f);
      std::fill(row + i + 1, row + rows, 0.0f);
    }
    sgemm(false, true, rows, rows, dk, k, key_stride, k, key_stride, 0, a, rows);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < rows; ++j) a[i * rows + j] *= j < i ? beta_of(i) * decay[i * rows + j] : 0.0f;
    }
  }

  float beta_of(int64_t i) const { return beta[i * gate_stride]; }
  float decay_to_end(int64_t i) const { return decay[(rows - 1) * rows + i]; }
  float decay_of_all() const { return entry[rows - 1]; }

  // x [rows, dv] = (I + A)⁻¹ x, or with the transpose.
  void solve(bool transpose, float* x) const {
    const int m = int(dv), n = int(rows);
    const float one = 1.0f;
    strsm_("R", "U", transpose ? "T" : "N", "U", &m, &n, &one, a, &n, x, &m);
  }

  void make_u(const float* state, float* u) const {
    sgemm(false, false, rows, dv, dk, k, key_stride, state, dv, 0, u, dv);
    for (int64_t i = 0; i < rows; ++i) {
      const float *value = v + i * value_stride, b = beta_of(i);
      for (int64_t c = i * dv; c < (i + 1) * dv; ++c) u[c] = b * (*value++ - entry[i] * u[c]);
    }
    solve(false, u);
  }

  // [rows, rows], q_i·k_j decayed.
  void make_scores(float* scores) const {
    sgemm(false, true, rows, rows, dk, q, key_stride, k, key_stride, 0, scores, rows);
    for (int64_t i = 0; i < rows * rows; ++i) scores[i] *= decay[i];
  }

  void advance(const float* u, float* state, float* scratch) const {
    scale_rows(u, dv, scratch, rows, dv, [&](int64_t i) { return decay_to_end(i); });
    const float all = decay_of_all();
    for (int64_t c = 0; c < dk * dv; ++c) state[c] *= all;
    sgemm(true, false, dk, dv, rows, k, key_stride, scratch, dv, 1, state, dv);
  }
};

// Calls body(segment, head, first token, tokens) for all segments and value heads, on all threads.
template <typename Body>
void for_heads(const Inputs& in, const Body& body) {
  const int64_t heads = in.value_heads();
  at::parallel_for(0, in.segments() * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int32_t* start = ints(in.starts) + item / heads;
      body(item / heads, item % heads, int64_t{start[0]}, int64_t{start[1] - start[0]});
    }
  });
}

void initial_state(const Inputs& in, int64_t segment, int64_t head, float* state) {
  const int64_t at = (segment * in.value_heads() + head) * in.state_size();
  in.initial.defined() ? std::copy_n(floats(in.initial) + at, in.state_size(), state)
                       : std::fill_n(state, in.state_size(), 0.0f);
}

// out and state fp32; q and k of `in` scaled.
void forward_cpu(const Inputs& in, const Tensor& out, const Tensor& states) {
  const int64_t heads = in.value_heads(), dv = in.value_size(), stride = heads * dv;
  for_heads(in, [&](int64_t segment, int64_t head, int64_t first, int64_t tokens) {
    float* state = floats(states) + (segment * heads + head) * in.state_size();
    initial_state(in, segment, head, state);
    std::vector<float> u(kChunk * dv), scratch(kChunk * dv), scores(kChunk * kChunk);
    for (int64_t t = 0; t < tokens; t += kChunk) {
      const Chunk chunk(in, first + t, std::min(kChunk, tokens - t), head);
      const int64_t n = chunk.rows;
      float* to = floats(out) + (first + t) * stride + head * dv;
      chunk.make_u(state, u.data());
      sgemm(false, false, n, dv, chunk.dk, chunk.q, chunk.key_stride, state, dv, 0, to, stride);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < dv; ++c) to[i * stride + c] *= chunk.entry[i];
      }
      chunk.make_scores(scores.data());
      sgemm(false, false, n, dv, n, scores.data(), n, u.data(), dv, 1, to, stride);
      chunk.advance(u.data(), state, scratch.data());
    }
  });
}

struct Gradients {
  Tensor q, k;        // [T, Hv, Dk] fp32, of the scaled rows, a value head each
  Tensor v, g, beta;  // as the inputs, fp32
  Tensor initial;     // [segments, Hv, Dk, Dv]
};

void backward_cpu(const Inputs& in, const Tensor& d_out, const Tensor& d_states, const Gradients& grads) {
  const int64_t heads = in.value_heads(), dk = in.key_size(), dv = in.value_size(), size = in.state_size();
  grads.initial.copy_(d_states);
  for_heads(in, [&](int64_t segment, int64_t head, int64_t first, int64_t tokens) {
    const int64_t chunks = (tokens + kChunk - 1) / kChunk;
    std::vector<float> states((chunks + 1) * size), u(tokens * dv);  // the states before each chunk
    std::vector<float> scores(kChunk * kChunk), d_scores(kChunk * kChunk), d_a(kChunk * kChunk), scaled_d_a(d_a);
    std::vector<float> d_rows(kChunk * dv), z(kChunk * dv), scaled(kChunk * dv), row(kChunk * dk), source(kChunk * dk);
    initial_state(in, segment, head, states.data());
    for (int64_t c = 0; c < chunks; ++c) {
      const Chunk chunk(in, first + c * kChunk, std::min(kChunk, tokens - c * kChunk), head);
      float *state = states.data() + c * size, *chunk_u = u.data() + c * kChunk * dv;
      chunk.make_u(state, chunk_u);
      std::copy_n(state, size, state + size);
      chunk.advance(chunk_u, state + size, scaled.data());
    }
    float* d_state = floats(grads.initial) + (segment * heads + head) * size;
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const int64_t at = first + c * kChunk;
      const Chunk chunk(in, at, std::min(kChunk, tokens - c * kChunk), head);
      const int64_t n = chunk.rows, stride = chunk.key_stride;
      const float *state = states.data() + c * size, *chunk_u = u.data() + c * kChunk * dv;
      float *dq = floats(grads.q) + (at * heads + head) * dk, *d_k = floats(grads.k) + (at * heads + head) * dk;
      const float* dy = floats(d_out) + (at * heads + head) * dv;
      // Through U: z is the gradient of β (V − e^G K S).
      chunk.make_scores(scores.data());
      scale_rows(dy, heads * dv, d_rows.data(), n, dv, [](int64_t) { return 1.0f; });
      sgemm(false, false, n, dv, dk, chunk.k, stride, d_state, dv, 0, z.data(), dv);
      scale_rows(z.data(), dv, z.data(), n, dv, [&](int64_t i) { return chunk.decay_to_end(i); });
      sgemm(true, false, n, dv, n, scores.data(), n, d_rows.data(), dv, 1, z.data(), dv);
      chunk.solve(true, z.data());
      // Of the scores and of A / β, without their decay.
      sgemm(false, true, n, n, dv, d_rows.data(), dv, chunk_u, dv, 0, d_scores.data(), n);
      sgemm(false, true, n, n, dv, z.data(), dv, chunk_u, dv, 0, d_a.data(), n);
      // g_t is in the decay from row j to row i where j < t ≤ i: its gradient is the sum of those pairs' own. (As a sum
      // of rows less one of columns it would drown in what these have in common, where the decay is strong.)
      std::array<double, kChunk> dg{}, enters{}, leaves{};
      for (int64_t i = 0; i < n; ++i) {
        double pairs = 0;
        for (int64_t j = 0; j < i; ++j) {
          const int64_t ij = i * n + j;
          dg[j + 1] += pairs += scores[ij] * d_scores[ij] - chunk.a[ij] * d_a[ij];
        }
        for (int64_t j = 0; j < n; ++j) {
          const int64_t ij = i * n + j;
          d_scores[ij] *= chunk.decay[ij];
          d_a[ij] = j < i ? -d_a[ij] * chunk.decay[ij] : 0.0f;
          scaled_d_a[ij] = chunk.beta_of(i) * d_a[ij];
        }
      }
      // k as a source of what later rows and the state read.
      scale_rows(chunk_u, dv, scaled.data(), n, dv, [&](int64_t i) { return chunk.decay_to_end(i); });
      sgemm(false, true, n, dk, dv, scaled.data(), dv, d_state, dv, 0, source.data(), dk);
      const double passes = chunk.decay_of_all() * dot(state, d_state, size);
      for (int64_t i = 0; i < n; ++i) leaves[i] = dot(source.data() + i * dk, chunk.k + i * stride, dk);
      sgemm(true, false, n, dk, n, d_scores.data(), n, chunk.q, stride, 1, source.data(), dk);
      sgemm(true, false, n, dk, n, scaled_d_a.data(), n, chunk.k, stride, 1, source.data(), dk);
      // q, and k as a row of A and of e^G K S (times β); and d_state before the chunk.
      scale_rows(d_rows.data(), dv, scaled.data(), n, dv, [&](int64_t i) { return chunk.entry[i]; });
      sgemm(false, true, n, dk, dv, scaled.data(), dv, state, dv, 0, dq, heads * dk);
      for (int64_t i = 0; i < n; ++i) enters[i] = dot(chunk.q + i * stride, dq + i * heads * dk, dk);
      sgemm(false, false, n, dk, n, d_scores.data(), n, chunk.k, stride, 1, dq, heads * dk);
      const float all = chunk.decay_of_all();
      for (int64_t i = 0; i < size; ++i) d_state[i] *= all;
      sgemm(true, false, dk, dv, n, chunk.q, stride, scaled.data(), dv, 1, d_state, dv);
      scale_rows(z.data(), dv, scaled.data(), n, dv, [&](int64_t i) { return -chunk.entry[i]; });
      sgemm(false, true, n, dk, dv, scaled.data(), dv, state, dv, 0, row.data(), dk);
      for (int64_t i = 0; i < n; ++i) {
        enters[i] += chunk.beta_of(i) * dot(chunk.k + i * stride, row.data() + i * dk, dk);
      }
      sgemm(false, false, n, dk, n, d_a.data(), n, chunk.k, stride, 1, row.data(), dk);
      scale_rows(scaled.data(), dv, scaled.data(), n, dv, [&](int64_t i) { return chunk.beta_of(i); });
      sgemm(true, false, dk, dv, n, chunk.k, stride, scaled.data(), dv, 1, d_state, dv);
      double entered = 0, left = 0;  // from the state to row i or a later one; from an earlier one to the state
      for (int64_t i = n - 1; i >= 0; --i) dg[i] += entered += enters[i];
      for (int64_t i = 0; i < n; left += leaves[i++]) {
        const float* key = chunk.k + i * stride;
        const float beta = chunk.beta_of(i), d_row = dot(key, row.data() + i * dk, dk);
        floats(grads.g)[(at + i) * heads + head] = static_cast<float>(dg[i] + left + passes);
        floats(grads.beta)[(at + i) * heads + head] =
            d_row + dot(z.data() + i * dv, chunk.v + i * chunk.value_stride, dv);
        for (int64_t d = 0; d < dk; ++d) d_k[i * heads * dk + d] = beta * row[i * dk + d] + source[i * dk + d];
        float* to = floats(grads.v) + ((at + i) * heads + head) * dv;
        for (int64_t d = 0; d < dv; ++d) to[d] = beta * z[i * dv + d];
      }
    }
  });
}

Tensor inverse_length(const Tensor& x) { return x.square().sum(-1, true).add_(1e-6).rsqrt_(); }

// In fp32, q and k scaled to their lengths.
Inputs scaled_inputs(const Inputs& in) {
  const Tensor q = in.q.to(at::kFloat), k = in.k.to(at::kFloat), v = in.v.to(at::kFloat);
  const double scale = 1.0 / std::sqrt(static_cast<double>(in.key_size()));
  return {q * inverse_length(q).mul_(scale), k * inverse_length(k), v, in.g, in.beta, in.starts, in.initial};
}

// The gradient of x from those of x · inverse_length(x) · scale, [T, Hv, Dk], whose value heads share x's heads.
Tensor unscale(const Tensor& x, const Tensor& d_heads, double scale) {
  const Tensor x32 = x.to(at::kFloat), inverse = inverse_length(x32), unit = x32 * inverse;
  const Tensor d_unit = d_heads.unflatten(1, {x.size(1), d_heads.size(1) / x.size(1)}).sum(2).mul_(scale);
  return d_unit.sub_(unit * (unit * d_unit).sum(-1, true)).mul_(inverse).to(x.scalar_type());
}

// The kernels' arguments; `scratch` keeps what they point to.
GatedDeltaRuleArgs cuda_args(const Inputs& in, bool backward, std::vector<Tensor>& scratch) {
  GatedDeltaRuleArgs args = {};
  args.q = in.q, args.k = in.k, args.v = in.v, args.g = in.g, args.beta = in.beta;
  args.starts = in.starts, args.initial = in.initial;
  args.q_stride = in.q.stride(0), args.k_stride = in.k.stride(0), args.v_stride = in.v.stride(0);
  args.tokens = in.tokens(), args.segments = in.segments();
  args.key_heads = in.key_heads(), args.value_heads = in.value_heads();
  args.key_size = in.key_size(), args.value_size = in.value_size();
  const auto [places, rows, size] = gated_delta_rule_chunks(args);
  const auto make = [&](const Tensor& like, int64_t height, int64_t width) {
    return scratch.emplace_back(at::empty({places * in.value_heads(), height, width}, like.options()));
  };
  args.factors = make(in.g, 3, rows);
  args.w = make(in.q, rows, size);
  args.u = make(in.q, rows, size);
  args.states = make(in.q, size, size);
  if (!backward) return args;
  args.inverse = make(in.q, rows, rows);
  args.d_u = make(in.q, rows, size);
  args.d_states = make(in.q, size, size);
  return args;
}

GatedDeltaRule forward(const Inputs& in) {
  const Tensor out = at::empty(in.v.sizes(), in.v.options());
  const Tensor state = at::empty({in.segments(), in.value_heads(), in.key_size(), in.value_size()}, in.g.options());
  if (in.q.is_cuda()) {
    std::vector<Tensor> scratch;
    MARROW_CUDA_CALL(gated_delta_rule_forward_cuda(cuda_args(in, false, scratch), out, state));
    return {out, state};
  }
  const Tensor out32 = out.to(at::kFloat);
  forward_cpu(scaled_inputs(in), out32, state);
  return {out32.to(out.scalar_type()), state};
}

variable_list backward(const Inputs& in, const Tensor& d_out, const Tensor& d_state) {
  const auto empty = [](const Tensor& x) { return at::empty(x.sizes(), x.options()); };
  const Tensor dg = empty(in.g), d_beta = empty(in.beta), d_initial = empty(d_state);
  if (in.q.is_cuda()) {
    const Tensor dq = empty(in.q), dk = empty(in.k), dv = empty(in.v);
    std::vector<Tensor> scratch;
    MARROW_CUDA_CALL(gated_delta_rule_backward_cuda(cuda_args(in, true, scratch), d_out, d_state,
                                                    {dq, dk, dv, dg, d_beta, d_initial}));
    return {dq, dk, dv, dg, d_beta, d_initial};
  }
  const Tensor dq = at::empty({in.tokens(), in.value_heads(), in.key_size()}, in.g.options()), dk = empty(dq);
  const Tensor dv = at::empty(in.v.sizes(), in.g.options());
  backward_cpu(scaled_inputs(in), d_out.to(at::kFloat), d_state, {dq, dk, dv, dg, d_beta, d_initial});
  const double scale = 1.0 / std::sqrt(static_cast<double>(in.key_size()));
  return {unscale(in.q, dq, scale), unscale(in.k, dk, 1.0), dv.to(in.v.scalar_type()), dg, d_beta, d_initial};
}

// Tokens' heads one after the other; on a GPU, tokens may be apart, but start at packs.
Tensor dense_rows(const Tensor& x) {
  const Tensor rows = x.detach();
  if (!x.is_cuda() || x.dim() != 3) return rows.contiguous();
  const bool fits = x.stride(2) == 1 && x.stride(1) == x.size(2) && x.stride(0) % 8 == 0 &&
                    reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
  return fits ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

void check_inputs(const Inputs& in) {
  const at::Device device = in.q.device();
  const at::ScalarType dtype = in.q.scalar_type();
  const auto fits = [&](const Tensor& x) { return x.dim() == 3 && x.scalar_type() == dtype && x.device() == device; };
  MARROW_CHECK((dtype == at::kFloat || dtype == at::kBFloat16) && fits(in.q) && fits(in.k) && fits(in.v) &&
                   in.k.sizes() == in.q.sizes() && in.v.size(0) == in.q.size(0),
               ExitCode::kUsage, Fix("compare linear_*_head_dim of config.json with the weights' shapes"),
               "gated_delta_rule: q {}, k {}, v {}, {}", c10::str(in.q.sizes()), c10::str(in.k.sizes()),
               c10::str(in.v.sizes()), c10::toString(dtype));
  const int64_t tokens = in.tokens(), heads = in.value_heads();
  check_tensor("gated_delta_rule: g", in.g, at::kFloat, {tokens, heads}, device);
  check_tensor("gated_delta_rule: beta", in.beta, at::kFloat, {tokens, heads}, device);
  check_segments("gated_delta_rule: starts", in.starts, tokens, device);
  MARROW_CHECK(in.key_heads() > 0 && heads % in.key_heads() == 0, ExitCode::kUsage,
               Fix("set linear_num_value_heads to a multiple of linear_num_key_heads in config.json"),
               "gated_delta_rule: {} value heads, {} key heads", heads, in.key_heads());
  if (in.initial.defined()) {
    check_tensor("gated_delta_rule: initial", in.initial, at::kFloat,
                 {in.segments(), heads, in.key_size(), in.value_size()}, device);
  }
  const int64_t dk = in.key_size(), dv = in.value_size();
  MARROW_CHECK(device.is_cpu() || (dk % 8 == 0 && dv % 8 == 0 && dk <= 128 && dv <= 128), ExitCode::kUsage,
               Fix("set linear_key_head_dim and linear_value_head_dim to multiples of 8 up to 128"),
               "gated_delta_rule: heads of {} and {} on a GPU", dk, dv);
}

}  // namespace

GatedDeltaRule gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                                const Tensor& starts, const Tensor& initial) {
  const auto dense = [](const Tensor& x) { return x.defined() ? x.detach().contiguous() : x; };
  const Inputs in{dense_rows(q), dense_rows(k), dense_rows(v), dense(g), dense(beta), dense(starts), dense(initial)};
  check_inputs(in);
  const GatedDeltaRule made = forward(in);
  const variable_list out = differentiable(
      {q, k, v, g, beta, initial}, {made.out, made.state},
      [in](const variable_list& d_out) { return backward(in, d_out[0].contiguous(), d_out[1].contiguous()); });
  return {out[0], out[1]};
}

}  // namespace marrow
