#include "ops/qk_norm_rope.h"

#include "ops/cpu_loops.h"
#include "ops/cuda_launch.h"
#include "ops/qk_norm_rope_cuda.h"
#include "ops/saved_state.h"

namespace marrow {
namespace {

constexpr int64_t kTokensPerPartial = 256;  // fixed: gradients must not depend on the threads
constexpr int64_t kMaxHeadSize = 512;

struct RopeState {
  Parameter q_norm;
  Parameter k_norm;
  RopeTable table;
  at::Tensor positions;
  int64_t q_heads;
  int64_t kv_heads;
  double eps;

  int64_t head_size() const { return q_norm.value.numel(); }
};

QkNormRopeArgs make_args(const at::Tensor& qkv, const RopeState& state) {
  return {qkv.const_data_ptr(),
          state.q_norm.value.const_data_ptr(),
          state.k_norm.value.const_data_ptr(),
          state.table.cos.const_data_ptr<float>(),
          state.table.sin.const_data_ptr<float>(),
          state.positions.const_data_ptr<int32_t>(),
          qkv.size(0),
          state.q_heads,
          state.kv_heads,
          state.head_size(),
          static_cast<float>(state.eps),
          qkv.scalar_type() == at::kBFloat16};
}

template <typename T>
void norm_and_rotate(const T* x, const T* norm, const float* cos, const float* sin, T* out,
                     int64_t size, float eps) {
  const float scale = inverse_rms(x, size, eps);
  const int64_t half = size / 2;
#pragma omp simd
  for (int64_t c = 0; c < half; ++c) {
    const float a = static_cast<float>(x[c]) * scale * static_cast<float>(norm[c]);
    const float b = static_cast<float>(x[c + half]) * scale * static_cast<float>(norm[c + half]);
    out[c] = static_cast<T>(a * cos[c] - b * sin[c]);
    out[c + half] = static_cast<T>(b * cos[c] + a * sin[c]);
  }
}

// Gradient through the rotation and the norm of one head; adds to the norm weight's.
template <typename T>
void rotate_and_norm_backward(const T* x, const T* norm, const float* cos, const float* sin,
                              const T* d_out, T* dx, float* d_norm, int64_t size, float eps) {
  const float scale = inverse_rms(x, size, eps);
  const int64_t half = size / 2;
  std::array<float, kMaxHeadSize> grads;  // of the normed head
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t c = 0; c < half; ++c) {
    const float a = static_cast<float>(d_out[c]);
    const float b = static_cast<float>(d_out[c + half]);
    grads[c] = a * cos[c] + b * sin[c];
    grads[c + half] = b * cos[c] - a * sin[c];
    const float xa = static_cast<float>(x[c]);
    const float xb = static_cast<float>(x[c + half]);
    d_norm[c] += grads[c] * xa * scale;
    d_norm[c + half] += grads[c + half] * xb * scale;
    grads[c] *= static_cast<float>(norm[c]);
    grads[c + half] *= static_cast<float>(norm[c + half]);
    dot += grads[c] * xa + grads[c + half] * xb;
  }
  const float shift = dot * scale * scale / static_cast<float>(size);
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) {
    dx[c] = static_cast<T>(scale * (grads[c] - static_cast<float>(x[c]) * shift));
  }
}

template <typename T>
void forward_cpu(const QkNormRopeArgs& args, T* q, T* k) {
  const int64_t size = args.head_size;
  const int64_t heads = args.q_heads + 2 * args.kv_heads;
  const auto* q_norm = static_cast<const T*>(args.q_norm);
  const auto* k_norm = static_cast<const T*>(args.k_norm);
  at::parallel_for(0, args.tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = static_cast<const T*>(args.qkv) + t * heads * size;
      const float* cos = args.cos + args.positions[t] * (size / 2);
      const float* sin = args.sin + args.positions[t] * (size / 2);
      for (int64_t h = 0; h < args.q_heads; ++h, x += size) {
        T* out = q + (t * args.q_heads + h) * size;
        norm_and_rotate(x, q_norm, cos, sin, out, size, args.eps);
      }
      for (int64_t h = 0; h < args.kv_heads; ++h, x += size) {
        T* out = k + (t * args.kv_heads + h) * size;
        norm_and_rotate(x, k_norm, cos, sin, out, size, args.eps);
      }
    }
  });
}

// d_norms: [2D], q's then k's, added to.
template <typename T>
void backward_token(const QkNormRopeArgs& args, int64_t t, const T* dq, const T* dk, const T* dv,
                    T* d_qkv, float* d_norms) {
  const int64_t size = args.head_size;
  const int64_t start = t * (args.q_heads + 2 * args.kv_heads) * size;
  const T* x = static_cast<const T*>(args.qkv) + start;
  T* dx = d_qkv + start;
  const float* cos = args.cos + args.positions[t] * (size / 2);
  const float* sin = args.sin + args.positions[t] * (size / 2);
  for (int64_t h = 0; h < args.q_heads + args.kv_heads; ++h, x += size, dx += size) {
    const bool is_q = h < args.q_heads;
    const T* d = is_q ? dq + (t * args.q_heads + h) * size
                      : dk + (t * args.kv_heads + h - args.q_heads) * size;
    const auto* norm = static_cast<const T*>(is_q ? args.q_norm : args.k_norm);
    rotate_and_norm_backward(x, norm, cos, sin, d, dx, d_norms + (is_q ? 0 : size), size, args.eps);
  }
  std::copy_n(dv + t * args.kv_heads * size, args.kv_heads * size, dx);
}

template <typename T>
void backward_cpu(const QkNormRopeArgs& args, const T* dq, const T* dk, const T* dv, T* d_qkv,
                  float* q_norm_grad, float* k_norm_grad) {
  const int64_t size = args.head_size;
  const int64_t chunks = (args.tokens + kTokensPerPartial - 1) / kTokensPerPartial;
  std::vector<float> partials(chunks * 2 * size, 0.0f);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t last = std::min(args.tokens, (chunk + 1) * kTokensPerPartial);
      for (int64_t t = chunk * kTokensPerPartial; t < last; ++t) {
        backward_token(args, t, dq, dk, dv, d_qkv, partials.data() + chunk * 2 * size);
      }
    }
  });
  for (int64_t i = 2 * size; i < chunks * 2 * size; ++i) partials[i % (2 * size)] += partials[i];
  for (int64_t c = 0; c < size; ++c) {
    if (q_norm_grad != nullptr) q_norm_grad[c] += partials[c];
    if (k_norm_grad != nullptr) k_norm_grad[c] += partials[size + c];
  }
}

float* grad_pointer(const Parameter& parameter) {
  return parameter.grad.defined() ? parameter.grad.data_ptr<float>() : nullptr;
}

struct QkNormRopeFunction : torch::autograd::Function<QkNormRopeFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const at::Tensor& qkv, const RopeState& state) {
    ctx->save_for_backward({qkv});
    save_state(ctx, state);
    const int64_t tokens = qkv.size(0);
    const int64_t size = state.head_size();
    at::Tensor q = at::empty({tokens, state.q_heads, size}, qkv.options());
    at::Tensor k = at::empty({tokens, state.kv_heads, size}, qkv.options());
    // A tensor of its own on qkv's memory: autograd treats views that a Function returns specially.
    at::Tensor v = at::empty({0}, qkv.options());
    v.set_(qkv.storage(), qkv.storage_offset() + (state.q_heads + state.kv_heads) * size,
           {tokens, state.kv_heads, size}, {qkv.size(1), size, 1});
    if (tokens == 0) return {q, k, v};
    const QkNormRopeArgs args = make_args(qkv, state);
    if (qkv.is_cuda()) {
      MARROW_CUDA_CALL(
          qk_norm_rope_forward_cuda(args, q.data_ptr(), k.data_ptr(), current_cuda_stream()));
      return {q, k, v};
    }
    dispatch_working_dtype(qkv.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      forward_cpu(args, q.data_ptr<T>(), k.data_ptr<T>());
    });
    return {q, k, v};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& d_out) {
    const at::Tensor qkv = ctx->get_saved_variables()[0];
    const auto& state = saved_state<RopeState>(ctx);
    at::Tensor d_qkv = at::empty(qkv.sizes(), qkv.options());
    if (qkv.numel() == 0) return {d_qkv, at::Tensor()};
    const at::Tensor dq = d_out[0].contiguous();
    const at::Tensor dk = d_out[1].contiguous();
    const at::Tensor dv = d_out[2].contiguous();
    const QkNormRopeArgs args = make_args(qkv, state);
    float* q_norm_grad = grad_pointer(state.q_norm);
    float* k_norm_grad = grad_pointer(state.k_norm);
    if (qkv.is_cuda()) {
      const int64_t blocks = std::min(args.tokens, kQkNormPartials);
      const at::Tensor partials =
          at::empty({blocks, 2 * args.head_size}, qkv.options().dtype(at::kFloat));
      MARROW_CUDA_CALL(qk_norm_rope_backward_cuda(
          args, dq.const_data_ptr(), dk.const_data_ptr(), dv.const_data_ptr(), d_qkv.data_ptr(),
          partials.data_ptr<float>(), blocks, q_norm_grad, k_norm_grad, current_cuda_stream()));
      return {d_qkv, at::Tensor()};
    }
    dispatch_working_dtype(qkv.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      backward_cpu(args, dq.const_data_ptr<T>(), dk.const_data_ptr<T>(), dv.const_data_ptr<T>(),
                   d_qkv.data_ptr<T>(), q_norm_grad, k_norm_grad);
    });
    return {d_qkv, at::Tensor()};
  }
};

void check(const at::Tensor& qkv, const RopeState& state) {
  const int64_t size = state.head_size();
  MARROW_CHECK(size % 2 == 0 && size <= kMaxHeadSize, ExitCode::kUsage,
               Fix("set head_dim in config.json to an even number up to 512"),
               "qk_norm_rope: head size {}", size);
  MARROW_CHECK(qkv.dim() == 2 && qkv.size(1) == (state.q_heads + 2 * state.kv_heads) * size &&
                   state.k_norm.value.numel() == size &&
                   qkv.scalar_type() == state.q_norm.value.scalar_type() &&
                   qkv.scalar_type() == state.k_norm.value.scalar_type(),
               ExitCode::kUsage,
               Fix("compare num_attention_heads, num_key_value_heads and head_dim in config.json "
                   "with the weights"),
               "qk_norm_rope: qkv {} {} for {} q heads and {} kv heads of {}",
               c10::str(qkv.sizes()), c10::toString(qkv.scalar_type()), state.q_heads,
               state.kv_heads, size);
  MARROW_CHECK(state.table.cos.dim() == 2 && state.table.cos.size(1) == size / 2 &&
                   state.table.cos.is_contiguous() && state.table.sin.is_contiguous() &&
                   state.positions.scalar_type() == at::kInt && state.positions.is_contiguous() &&
                   state.positions.numel() == qkv.size(0),
               ExitCode::kUsage, Fix("build the table with make_rope_table for this head_dim"),
               "qk_norm_rope: table {} and positions {} {} for {} tokens of head size {}",
               c10::str(state.table.cos.sizes()), c10::str(state.positions.sizes()),
               c10::toString(state.positions.scalar_type()), qkv.size(0), size);
  if (!qkv.is_cpu()) return;
  const int32_t* position = state.positions.const_data_ptr<int32_t>();
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

RopeTable make_rope_table(std::span<const double> inverse_frequencies, int64_t positions,
                          double scale, at::Device device) {
  const auto pairs = static_cast<int64_t>(inverse_frequencies.size());
  at::Tensor cos = at::empty({positions, pairs}, at::kFloat);
  at::Tensor sin = at::empty({positions, pairs}, at::kFloat);
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

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rope(
    const at::Tensor& qkv, const Parameter& q_norm, const Parameter& k_norm, const RopeTable& table,
    const at::Tensor& positions, int64_t q_heads, int64_t kv_heads, double eps) {
  const RopeState state{q_norm, k_norm, table, positions, q_heads, kv_heads, eps};
  check(qkv, state);
  const auto outputs = QkNormRopeFunction::apply(qkv.contiguous(), state);
  return {outputs[0], outputs[1], outputs[2]};
}

}  // namespace marrow
