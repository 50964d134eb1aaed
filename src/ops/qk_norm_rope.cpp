#include "ops/qk_norm_rope.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

constexpr int64_t kTokensPerPartial = 256;  // fixed: gradients must not depend on the threads
constexpr int64_t kMaxHeadSize = 512;

struct RopeState {
  Parameter q_norm, k_norm;
  RopeTable table;
  Tensor positions;
  int64_t q_heads, kv_heads;
  double eps;

  int64_t head_size() const { return q_norm.value.numel(); }
};

QkNormRopeArgs make_args(const Tensor& qkv, const RopeState& state) {
  return {qkv,
          state.q_norm.value,
          state.k_norm.value,
          floats(state.table.cos),
          floats(state.table.sin),
          ints(state.positions),
          state.q_heads,
          state.kv_heads,
          state.head_size(),
          static_cast<float>(state.eps)};
}

void norm_and_rotate(const float* x, const float* norm, const float* cos, const float* sin, float* out, int64_t size,
                     float eps) {
  const float scale = inverse_rms(x, size, eps);
  const int64_t half = size / 2;
#pragma omp simd
  for (int64_t c = 0; c < half; ++c) {
    const float a = x[c] * scale * norm[c];
    const float b = x[c + half] * scale * norm[c + half];
    out[c] = a * cos[c] - b * sin[c];
    out[c + half] = b * cos[c] + a * sin[c];
  }
}

// Gradient through the rotation and the norm of one head; adds to the norm weight's.
void rotate_and_norm_backward(const float* x, const float* norm, const float* cos, const float* sin, const float* d_out,
                              float* dx, float* d_norm, int64_t size, float eps) {
  const float scale = inverse_rms(x, size, eps);
  const int64_t half = size / 2;
  std::array<float, kMaxHeadSize> grads;  // of the normed head
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t c = 0; c < half; ++c) {
    grads[c] = d_out[c] * cos[c] + d_out[c + half] * sin[c];
    grads[c + half] = d_out[c + half] * cos[c] - d_out[c] * sin[c];
    d_norm[c] += grads[c] * x[c] * scale;
    d_norm[c + half] += grads[c + half] * x[c + half] * scale;
    grads[c] *= norm[c];
    grads[c + half] *= norm[c + half];
    dot += grads[c] * x[c] + grads[c + half] * x[c + half];
  }
  const float shift = dot * scale * scale / static_cast<float>(size);
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) dx[c] = scale * (grads[c] - x[c] * shift);
}

// A q or k head of a token on the CPU.
struct Head {
  int64_t in_qkv;    // offsets of elements: in qkv,
  int64_t in_own;    // in q or in k,
  int64_t in_table;  // in cos and sin
  bool is_q;
};

// Runs body(head) for the q and k heads of tokens [begin, end).
template <typename Body>
void for_heads(const QkNormRopeArgs& args, int64_t begin, int64_t end, const Body& body) {
  const int64_t size = args.head_size, row = args.q_heads + 2 * args.kv_heads;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t in_table = args.positions[t] * (size / 2);
    for (int64_t h = 0; h < args.q_heads + args.kv_heads; ++h) {
      const bool is_q = h < args.q_heads;
      const int64_t own = is_q ? t * args.q_heads + h : t * args.kv_heads + h - args.q_heads;
      body(Head{(t * row + h) * size, own * size, in_table, is_q});
    }
  }
}

// All fp32, but for the integers.
void forward_cpu(const QkNormRopeArgs& args, const Tensor& q, const Tensor& k) {
  const float *qkv = args.qkv, *q_norm = args.q_norm, *k_norm = args.k_norm;
  at::parallel_for(0, q.size(0), 16, [&](int64_t begin, int64_t end) {
    for_heads(args, begin, end, [&](const Head& head) {
      norm_and_rotate(qkv + head.in_qkv, head.is_q ? q_norm : k_norm, args.cos + head.in_table,
                      args.sin + head.in_table, floats(head.is_q ? q : k) + head.in_own, args.head_size, args.eps);
    });
  });
}

void backward_cpu(const QkNormRopeArgs& args, const Tensor& dq, const Tensor& dk, const Tensor& d_qkv,
                  const Tensor& q_norm_grad, const Tensor& k_norm_grad) {
  const float *qkv = args.qkv, *q_norm = args.q_norm, *k_norm = args.k_norm;
  const int64_t size = args.head_size, tokens = dq.size(0);
  const int64_t chunks = (tokens + kTokensPerPartial - 1) / kTokensPerPartial;
  std::vector<float> partials(chunks * 2 * size, 0.0f);  // [chunks, 2D], q's then k's
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t last = std::min(tokens, (chunk + 1) * kTokensPerPartial);
      for_heads(args, chunk * kTokensPerPartial, last, [&](const Head& head) {
        rotate_and_norm_backward(qkv + head.in_qkv, head.is_q ? q_norm : k_norm, args.cos + head.in_table,
                                 args.sin + head.in_table, floats(head.is_q ? dq : dk) + head.in_own,
                                 floats(d_qkv) + head.in_qkv,
                                 partials.data() + (2 * chunk + (head.is_q ? 0 : 1)) * size, size, args.eps);
      });
    }
  });
  if (q_norm_grad.defined()) {
    add_column_sums(partials.data(), chunks, 2 * size, size, floats(q_norm_grad));
  }
  if (k_norm_grad.defined()) {
    add_column_sums(partials.data() + size, chunks, 2 * size, size, floats(k_norm_grad));
  }
}

// The state with norm weights in fp32, for the CPU.
RopeState in_fp32(RopeState state) {
  state.q_norm.value = state.q_norm.value.to(at::kFloat);
  state.k_norm.value = state.k_norm.value.to(at::kFloat);
  return state;
}

struct QkNormRopeFunction : torch::autograd::Function<QkNormRopeFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& qkv, const RopeState& state) {
    ctx->save_for_backward({qkv});
    save_state(ctx, state);
    const int64_t tokens = qkv.size(0), size = state.head_size();
    Tensor q = at::empty({tokens, state.q_heads, size}, qkv.options());
    Tensor k = at::empty({tokens, state.kv_heads, size}, qkv.options());
    // A tensor of its own on qkv's memory: autograd treats views that a Function returns specially.
    Tensor v = at::empty({0}, qkv.options());
    v.set_(qkv.storage(), qkv.storage_offset() + (state.q_heads + state.kv_heads) * size,
           {tokens, state.kv_heads, size}, {qkv.size(1), size, 1});
    if (tokens == 0) return {q, k, v};
    if (qkv.is_cuda()) {
      MARROW_CUDA_CALL(qk_norm_rope_forward_cuda(make_args(qkv, state), q, k));
      return {q, k, v};
    }
    const RopeState state32 = in_fp32(state);
    const Tensor qkv32 = qkv.to(at::kFloat), q32 = q.to(at::kFloat), k32 = k.to(at::kFloat);
    forward_cpu(make_args(qkv32, state32), q32, k32);
    return {q32.to(q.scalar_type()), k32.to(k.scalar_type()), v};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_out) {
    const Tensor qkv = ctx->get_saved_variables()[0];
    const auto& state = saved_state<RopeState>(ctx);
    const Tensor &q_grad = state.q_norm.grad, &k_grad = state.k_norm.grad;
    const Tensor dq = d_out[0].contiguous(), dk = d_out[1].contiguous();
    Tensor d_qkv = at::empty_like(qkv);
    if (qkv.numel() == 0) return {d_qkv, Tensor()};
    if (qkv.is_cuda()) {
      const Tensor partials =
          at::empty({std::min(qkv.size(0), kNormPartials), 2 * state.head_size()}, qkv.options().dtype(at::kFloat));
      MARROW_CUDA_CALL(qk_norm_rope_backward_cuda(make_args(qkv, state), dq, dk, d_out[2].contiguous(), d_qkv, partials,
                                                  q_grad, k_grad));
      return {d_qkv, Tensor()};
    }
    const RopeState state32 = in_fp32(state);
    const Tensor qkv32 = qkv.to(at::kFloat), d_qkv32 = d_qkv.to(at::kFloat);
    d_qkv32.slice(1, qkv.size(1) - state.kv_heads * state.head_size()).copy_(d_out[2].flatten(1));
    backward_cpu(make_args(qkv32, state32), dq.to(at::kFloat), dk.to(at::kFloat), d_qkv32, q_grad, k_grad);
    return {d_qkv32.to(qkv.scalar_type()), Tensor()};
  }
};

void check(const Tensor& qkv, const RopeState& state) {
  const int64_t size = state.head_size();
  MARROW_CHECK(size % 2 == 0 && size <= kMaxHeadSize, ExitCode::kUsage,
               Fix("set head_dim in config.json to an even number up to 512"), "qk_norm_rope: head size {}", size);
  check_tensor("qk_norm_rope: qkv", qkv, kWorkingDtype, {-1, (state.q_heads + 2 * state.kv_heads) * size});
  check_tensor(state.q_norm.name, state.q_norm.value, qkv.scalar_type(), {size});
  check_tensor(state.k_norm.name, state.k_norm.value, qkv.scalar_type(), {size});
  check_tensor("qk_norm_rope: the table's cos", state.table.cos, at::kFloat, {-1, size / 2});
  check_tensor("qk_norm_rope: the table's sin", state.table.sin, at::kFloat, {-1, size / 2});
  check_tensor("qk_norm_rope: positions", state.positions, at::kInt, {qkv.size(0)});
  if (!qkv.is_cpu()) return;
  const int32_t* position = ints(state.positions);
  for (int64_t t = 0; t < qkv.size(0); ++t) {
    MARROW_CHECK(position[t] >= 0 && position[t] < state.table.cos.size(0), ExitCode::kUsage,
                 Fix("lower data.seq_len to max_position_embeddings of config.json"),
                 "position {} of token {} is outside of the rotary table's {} rows", position[t], t,
                 state.table.cos.size(0));
  }
}

}  // namespace

std::vector<double> rope_inverse_frequencies(double theta, int64_t dim) {
  std::vector<double> frequencies;
  for (int64_t i = 0; i < dim; i += 2) {
    frequencies.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(dim)));
  }
  return frequencies;
}

RopeTable make_rope_table(std::span<const double> inverse_frequencies, int64_t positions, double scale,
                          at::Device device) {
  const auto pairs = static_cast<int64_t>(inverse_frequencies.size());
  Tensor cos = at::empty({positions, pairs}, at::kFloat);
  Tensor sin = at::empty({positions, pairs}, at::kFloat);
  float* cos_value = cos.data_ptr<float>();
  float* sin_value = sin.data_ptr<float>();
  at::parallel_for(0, positions, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * pairs; i < end * pairs; ++i) {
      const auto frequency = static_cast<float>(inverse_frequencies[i % pairs]);
      const double angle = static_cast<float>(i / pairs) * frequency;  // in fp32
      cos_value[i] = static_cast<float>(std::cos(angle) * scale);
      sin_value[i] = static_cast<float>(std::sin(angle) * scale);
    }
  });
  return {cos.to(device), sin.to(device)};
}

std::tuple<Tensor, Tensor, Tensor> qk_norm_rope(const Tensor& qkv, const Parameter& q_norm, const Parameter& k_norm,
                                                const RopeTable& table, const Tensor& positions, int64_t q_heads,
                                                int64_t kv_heads, double eps) {
  const RopeState state{q_norm, k_norm, table, positions, q_heads, kv_heads, eps};
  const Tensor dense = qkv.contiguous();
  check(dense, state);
  const auto outputs = QkNormRopeFunction::apply(dense, state);
  return {outputs[0], outputs[1], outputs[2]};
}

}  // namespace marrow
