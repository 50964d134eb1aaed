#include "ops/mla_rope.h"

#include "ops/op_tools.h"

namespace marrow {
namespace {

struct MlaState {
  RopeTable table;
  Tensor positions;
  int64_t heads, nope, rope, value;

  MlaRopeArgs args() const { return {floats(table.cos), floats(table.sin), ints(positions), heads, nope, rope, value}; }
};

// Turns `pairs` pairs by their angles; direction −1 turns back. `to` may be `from`.
void turn(const float* from, float* to, const float* cos, const float* sin, int64_t pairs, float direction) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = from[2 * i], b = from[2 * i + 1], s = direction * sin[i];
    to[2 * i] = a * cos[i] - b * s;
    to[2 * i + 1] = b * cos[i] + a * s;
  }
}

// Runs body(token, its rows of cos and sin) for all tokens, on all threads.
template <typename Body>
void for_tokens(const MlaRopeArgs& args, int64_t tokens, const Body& body) {
  at::parallel_for(0, tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t at = args.positions[t] * (args.rope / 2);
      body(t, args.cos + at, args.sin + at);
    }
  });
}

// All fp32, but for the integers.
void forward_cpu(const MlaRopeArgs& args, const Tensor& q, const Tensor& kv, const Tensor& k_rope, const Tensor& q_out,
                 const Tensor& k_out, const Tensor& v_out) {
  const auto [n, r, dv] = std::array{args.nope, args.rope, args.value};
  for_tokens(args, q.size(0), [&](int64_t t, const float* cos, const float* sin) {
    for (int64_t h = t * args.heads; h < (t + 1) * args.heads; ++h) {
      const float *query = floats(q) + h * (n + r), *latent = floats(kv) + h * (n + dv);
      float *to_query = floats(q_out) + h * (n + r), *to_key = floats(k_out) + h * (n + r);
      std::copy_n(query, n, to_query);
      turn(query + n, to_query + n, cos, sin, r / 2, 1);
      std::copy_n(latent, n, to_key);
      turn(floats(k_rope) + t * r, to_key + n, cos, sin, r / 2, 1);
      std::copy_n(latent + n, dv, floats(v_out) + h * dv);
    }
  });
}

void backward_cpu(const MlaRopeArgs& args, const Tensor& dq_out, const Tensor& dk_out, const Tensor& dv_out,
                  const Tensor& dq, const Tensor& dkv, const Tensor& dk_rope) {
  const auto [n, r, dv] = std::array{args.nope, args.rope, args.value};
  for_tokens(args, dq.size(0), [&](int64_t t, const float* cos, const float* sin) {
    float* sum = floats(dk_rope) + t * r;
    std::fill_n(sum, r, 0.0f);
    for (int64_t h = t * args.heads; h < (t + 1) * args.heads; ++h) {
      const float *query = floats(dq_out) + h * (n + r), *key = floats(dk_out) + h * (n + r);
      float *to_query = floats(dq) + h * (n + r), *to_latent = floats(dkv) + h * (n + dv);
      std::copy_n(query, n, to_query);
      turn(query + n, to_query + n, cos, sin, r / 2, -1);
      std::copy_n(key, n, to_latent);
      std::copy_n(floats(dv_out) + h * dv, dv, to_latent + n);
      for (int64_t i = 0; i < r; ++i) sum[i] += key[n + i];
    }
    turn(sum, sum, cos, sin, r / 2, -1);
  });
}

// Calls run on three inputs and three outputs, on the CPU all as fp32; returns the outputs.
template <typename RunCpu, typename RunGpu>
variable_list run_on(const variable_list& in, const variable_list& out, const RunCpu& cpu, const RunGpu& gpu) {
  if (in[0].size(0) == 0) return out;
  if (in[0].is_cuda()) {
    gpu();
    return out;
  }
  variable_list in32, out32, results;
  for (const Tensor& x : in) in32.push_back(x.to(at::kFloat));
  for (const Tensor& x : out) out32.push_back(x.to(at::kFloat));
  cpu(in32, out32);
  for (size_t i = 0; i < out.size(); ++i) results.push_back(out32[i].to(out[i].scalar_type()));
  return results;
}

variable_list forward(const MlaState& state, const variable_list& in) {
  const MlaRopeArgs args = state.args();
  const int64_t tokens = in[0].size(0), size = state.nope + state.rope;
  const auto empty = [&](int64_t width) { return at::empty({tokens, state.heads, width}, in[0].options()); };
  const variable_list out{empty(size), empty(size), empty(state.value)};
  return run_on(
      in, out,
      [&](const auto& from, const auto& to) { forward_cpu(args, from[0], from[1], from[2], to[0], to[1], to[2]); },
      [&] { MARROW_CUDA_CALL(mla_rope_forward_cuda(args, in[0], in[1], in[2], out[0], out[1], out[2])); });
}

variable_list backward(const MlaState& state, const variable_list& d_out) {
  const MlaRopeArgs args = state.args();
  const variable_list in{d_out[0].contiguous(), d_out[1].contiguous(), d_out[2].contiguous()};
  const auto empty = [&](int64_t width) { return at::empty({in[0].size(0), width}, in[0].options()); };
  const variable_list out{empty(state.heads * (state.nope + state.rope)),
                          empty(state.heads * (state.nope + state.value)), empty(state.rope)};
  return run_on(
      in, out,
      [&](const auto& from, const auto& to) { backward_cpu(args, from[0], from[1], from[2], to[0], to[1], to[2]); },
      [&] { MARROW_CUDA_CALL(mla_rope_backward_cuda(args, in[0], in[1], in[2], out[0], out[1], out[2])); });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> mla_rope(const Tensor& q, const Tensor& kv, const Tensor& k_rope,
                                            const RopeTable& table, const Tensor& positions, int64_t heads,
                                            int64_t value_size) {
  const int64_t rope = k_rope.size(1), nope = q.size(1) / heads - rope;
  const MlaState state{table, positions, heads, nope, rope, value_size};
  MARROW_CHECK(nope >= 0 && nope % 2 == 0 && rope % 2 == 0 && value_size % 2 == 0, ExitCode::kUsage,
               Fix("set qk_nope_head_dim, qk_rope_head_dim and v_head_dim in config.json to even numbers"),
               "mla_rope: {} heads of {} + {}, values of {}", heads, nope, rope, value_size);
  const Tensor dense_q = q.contiguous(), dense_kv = kv.contiguous();
  check_tensor("mla_rope: q", dense_q, kWorkingDtype, {-1, heads * (nope + rope)});
  check_tensor("mla_rope: kv", dense_kv, q.scalar_type(), {q.size(0), heads * (nope + value_size)});
  check_tensor("mla_rope: the table's cos", table.cos, at::kFloat, {-1, rope / 2});
  check_tensor("mla_rope: the table's sin", table.sin, at::kFloat, {-1, rope / 2});
  check_tensor("mla_rope: positions", positions, at::kInt, {q.size(0)});
  if (q.is_cpu() && q.size(0) > 0) {
    const auto [low, high] = std::minmax_element(ints(positions), ints(positions) + q.size(0));
    MARROW_CHECK(*low >= 0 && *high < table.cos.size(0), ExitCode::kUsage,
                 Fix("lower data.seq_len to max_position_embeddings of config.json"),
                 "positions {} to {} are not within the rotary table's {} rows", *low, *high, table.cos.size(0));
  }
  // A copy even of a dense slice: the kernels' packs need a row that starts at a pack.
  const Tensor dense_rope = k_rope.detach().clone(at::MemoryFormat::Contiguous);
  const variable_list made = forward(state, {dense_q.detach(), dense_kv.detach(), dense_rope});
  const variable_list out = differentiable({dense_q, dense_kv, k_rope}, made,
                                           [state](const variable_list& d_out) { return backward(state, d_out); });
  return {out[0], out[1], out[2]};
}

}  // namespace marrow
