#include "ops/qk_norm_rope.h"

#include <numbers>

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

constexpr int64_t kMaxHeadSize = 512;

// Turns the pairs (c, c + half) of a head; back with sign = -1.
void rotate(float* head, const float* cos, const float* sin, int64_t half, float sign) {
#pragma omp simd
  for (int64_t c = 0; c < half; ++c) {
    const float a = head[c], b = head[c + half], s = sign * sin[c];
    head[c] = a * cos[c] - b * s;
    head[c + half] = b * cos[c] + a * s;
  }
}

// A q or k head of a token on the CPU, all fp32; `out` is its place in q or k, or in their gradients.
struct Head {
  const float *x, *norm, *cos, *sin;
  float* out;
  bool is_q;
};

// Runs body(head) for a token's q and k heads.
template <typename Body>
void for_heads(const QkNormRopeArgs& args, int64_t token, float* q, float* k, const Body& body) {
  const int64_t size = args.head_size, heads = args.q_heads + args.kv_heads;
  const float* x = static_cast<const float*>(args.qkv) + token * (heads + args.kv_heads) * size;
  const int64_t in_table = args.positions[token] * (size / 2);
  for (int64_t h = 0; h < heads; ++h) {
    const bool is_q = h < args.q_heads;
    float* out = is_q ? q + (token * args.q_heads + h) * size : k + (token * args.kv_heads + h - args.q_heads) * size;
    body(Head{x + h * size, is_q ? args.q_norm : args.k_norm, args.cos + in_table, args.sin + in_table, out, is_q});
  }
}

void forward_cpu(const QkNormRopeArgs& args, const Tensor& q, const Tensor& k) {
  const int64_t size = args.head_size;
  at::parallel_for(0, q.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for_heads(args, token, floats(q), floats(k), [&](const Head& head) {
        norm_row(head.x, head.norm, head.out, size, args.eps);
        rotate(head.out, head.cos, head.sin, size / 2, 1);
      });
    }
  });
}

// Adds to d_qkv; → the norms' gradients [2D], q's before k's.
std::vector<float> backward_cpu(const QkNormRopeArgs& args, const Tensor& dq, const Tensor& dk, const Tensor& d_qkv) {
  const int64_t size = args.head_size;
  const float* qkv = args.qkv;
  return sum_over_rows(dq.size(0), 2 * size, [&](int64_t token, float* d_norms) {
    for_heads(args, token, floats(dq), floats(dk), [&](const Head& head) {
      std::array<float, kMaxHeadSize> grads;  // of the normed head
      std::copy_n(head.out, size, grads.data());
      rotate(grads.data(), head.cos, head.sin, size / 2, -1);
      norm_row_backward(head.x, grads.data(), head.norm, floats(d_qkv) + (head.x - qkv),
                        head.is_q ? d_norms : d_norms + size, size, args.eps);
    });
  });
}

Tensor in_fp32(const Tensor& x) { return x.to(at::kFloat); }

// v [T, Hkv, D] of qkv: a tensor of its own on qkv's memory, no view: it gets a gradient of its own.
Tensor value_heads(const Tensor& qkv, int64_t kv_heads, int64_t size) {
  Tensor v = at::empty({0}, qkv.options());
  v.set_(qkv.storage(), qkv.storage_offset() + qkv.size(1) - kv_heads * size, {qkv.size(0), kv_heads, size},
         {qkv.size(1), size, 1});
  return v;
}

// Turns the pairs (c, c + D/2) of the first D elements of heads [T, h, ≥ D] into `out`; back with direction = -1.
void rotate_heads(const Tensor& heads, const RopeTable& table, const Tensor& positions, double direction,
                  const Tensor& out) {
  const int64_t half = table.cos.size(1);
  const Tensor c = table.cos.index_select(0, positions).unsqueeze(1);
  const Tensor s = table.sin.index_select(0, positions).unsqueeze(1).mul_(direction);
  const Tensor a = in_fp32(heads.narrow(2, 0, half)), b = in_fp32(heads.narrow(2, half, half));
  out.narrow(2, 0, half).copy_(a * c - b * s);
  out.narrow(2, half, half).copy_(b * c + a * s);
}

}  // namespace

void check_positions(const RopeTable& table, const Tensor& positions, int64_t tokens, int64_t size) {
  check_tensor("the rotary table's cos", table.cos, at::kFloat, {-1, size / 2});
  check_tensor("the rotary table's sin", table.sin, at::kFloat, {-1, size / 2});
  check_tensor("positions", positions, at::kInt, {tokens});
  for (int64_t t = 0; positions.is_cpu() && t < tokens; ++t) {
    const int32_t position = ints(positions)[t];
    MARROW_CHECK(position >= 0 && position < table.cos.size(0), ExitCode::kUsage,
                 Fix("lower data.seq_len to max_position_embeddings of config.json"),
                 "position {} of token {} is outside of the rotary table's {} rows", position, t, table.cos.size(0));
  }
}

std::vector<double> rope_inverse_frequencies(double theta, int64_t dim) {
  std::vector<double> frequencies;
  for (int64_t i = 0; i < dim; i += 2) {
    frequencies.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(dim)));
  }
  return frequencies;
}

std::vector<double> yarn_inverse_frequencies(double theta, int64_t dim, const YarnScaling& scaling) {
  std::vector<double> frequencies = rope_inverse_frequencies(theta, dim);
  const auto size = static_cast<double>(dim);
  const auto pair_that_turns = [&](double times) {
    return size * std::log(scaling.original_length / (times * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = pair_that_turns(scaling.beta_fast), high = pair_that_turns(scaling.beta_slow);
  if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, size - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double slowed = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] *= slowed / scaling.factor + (1 - slowed);
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
  const Tensor in = qkv.detach().contiguous();
  const int64_t tokens = in.size(0), size = q_norm.value.numel();
  MARROW_CHECK(size % 2 == 0 && size <= kMaxHeadSize, ExitCode::kUsage,
               Fix("set head_dim in config.json to an even number up to 512"), "qk_norm_rope: head size {}", size);
  check_tensor("qk_norm_rope: qkv", in, kWorkingDtype, {-1, (q_heads + 2 * kv_heads) * size});
  check_tensor(q_norm.name, q_norm.value, in.scalar_type(), {size});
  check_tensor(k_norm.name, k_norm.value, in.scalar_type(), {size});
  check_positions(table, positions, tokens, size);
  const auto args_of = [=](const Tensor& x, const Tensor& q_weight, const Tensor& k_weight) {
    return QkNormRopeArgs{x,       q_weight, k_weight, floats(table.cos),      floats(table.sin), ints(positions),
                          q_heads, kv_heads, size,     static_cast<float>(eps)};
  };
  Tensor q = at::empty({tokens, q_heads, size}, in.options());
  Tensor k = at::empty({tokens, kv_heads, size}, in.options());
  const Tensor v = value_heads(in, kv_heads, size);
  if (in.is_cuda() && tokens > 0) {
    MARROW_CUDA_CALL(qk_norm_rope_forward_cuda(args_of(in, q_norm.value, k_norm.value), q, k));
  } else if (tokens > 0) {
    const Tensor q32 = in_fp32(q), k32 = in_fp32(k);
    forward_cpu(args_of(in_fp32(in), in_fp32(q_norm.value), in_fp32(k_norm.value)), q32, k32);
    q = q32.to(in.scalar_type());
    k = k32.to(in.scalar_type());
  }
  const auto backward = [=](const variable_list& d_out) -> variable_list {
    const Tensor dq = d_out[0].contiguous(), dk = d_out[1].contiguous(), d_qkv = at::empty_like(in);
    if (tokens == 0) return {d_qkv};
    if (in.is_cuda()) {
      const Tensor partials = at::empty({std::min(tokens, kNormPartials), 2 * size}, in.options().dtype(at::kFloat));
      MARROW_CUDA_CALL(qk_norm_rope_backward_cuda(args_of(in, q_norm.value, k_norm.value), dq, dk,
                                                  d_out[2].contiguous(), d_qkv, partials, q_norm.grad, k_norm.grad));
      return {d_qkv};
    }
    const Tensor d_qkv32 = at::zeros(in.sizes(), at::kFloat);
    d_qkv32.slice(1, in.size(1) - kv_heads * size).copy_(d_out[2].flatten(1));
    const auto sums = backward_cpu(args_of(in_fp32(in), in_fp32(q_norm.value), in_fp32(k_norm.value)), in_fp32(dq),
                                   in_fp32(dk), d_qkv32);
    add_sums(sums.data(), q_norm.grad);
    add_sums(sums.data() + size, k_norm.grad);
    return {d_qkv32.to(in.scalar_type())};
  };
  const variable_list outputs = differentiable({qkv}, {q, k, v}, backward);
  return {outputs[0], outputs[1], outputs[2]};
}

std::tuple<Tensor, Tensor, Tensor> split_and_rotate(const Tensor& qkv, const RopeTable& table, const Tensor& positions,
                                                    int64_t q_heads, int64_t kv_heads) {
  const Tensor in = qkv.detach();
  const int64_t tokens = in.size(0), size = 2 * table.cos.size(1);
  check_tensor("split_and_rotate: qkv", in, kWorkingDtype, {-1, (q_heads + 2 * kv_heads) * size});
  check_positions(table, positions, tokens, size);
  const auto args_of = [=](const Tensor& x) {
    return QkNormRopeArgs{x,        {},   {},  floats(table.cos), floats(table.sin), ints(positions), q_heads,
                          kv_heads, size, 0.0f};
  };
  const auto heads_of = [=](const Tensor& x) {  // q, k and v
    return x.view({tokens, q_heads + 2 * kv_heads, size}).split_with_sizes({q_heads, kv_heads, kv_heads}, 1);
  };
  const variable_list heads = heads_of(in);
  const Tensor q = at::empty(heads[0].sizes(), in.options()), k = at::empty(heads[1].sizes(), in.options());
  const Tensor v = value_heads(in, kv_heads, size);
  const bool on_gpu = in.is_cuda() && tokens > 0;
  if (on_gpu) {
    MARROW_CUDA_CALL(split_and_rotate_forward_cuda(args_of(in), q, k));
  } else {
    rotate_heads(heads[0], table, positions, 1, q);
    rotate_heads(heads[1], table, positions, 1, k);
  }
  const variable_list outputs =
      differentiable({qkv}, {q, k, v}, [=, sizes = in.sizes().vec()](const variable_list& d_out) -> variable_list {
        const Tensor d_qkv = at::empty(sizes, d_out[0].options());
        if (on_gpu) {
          MARROW_CUDA_CALL(split_and_rotate_backward_cuda(args_of(d_qkv), d_out[0].contiguous(), d_out[1].contiguous(),
                                                          d_out[2].contiguous()));
          return {d_qkv};
        }
        const variable_list d_heads = heads_of(d_qkv);
        for (const int i : {0, 1}) rotate_heads(d_out[i], table, positions, -1, d_heads[i]);
        d_heads[2].copy_(d_out[2]);
        return {d_qkv};
      });
  return {outputs[0], outputs[1], outputs[2]};
}

Tensor rotate_front(const Tensor& heads, const RopeTable& table, const Tensor& positions) {
  const Tensor in = heads.detach();
  const int64_t size = 2 * table.cos.size(1);
  MARROW_CHECK(in.dim() == 3 && size <= in.size(2), ExitCode::kUsage,
               Fix("set partial_rotary_factor in config.json to at most 1"), "rotate_front: {} elements of heads {}",
               size, c10::str(in.sizes()));
  check_positions(table, positions, in.size(0), size);
  const auto turned = [=](const Tensor& x, double direction) {
    const Tensor out = x.clone(at::MemoryFormat::Contiguous);
    rotate_heads(x, table, positions, direction, out);
    return out;
  };
  return differentiable({heads}, {turned(in, 1)},
                        [=](const variable_list& d_out) -> variable_list { return {turned(d_out[0], -1)}; })[0];
}

}  // namespace marrow
