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

// Turns neighbours (2i, 2i + 1) of x [T, h, Dr] by the angles of their positions, in fp32; direction −1 turns back.
Tensor turned(const MlaState& state, const Tensor& x, double direction) {
  const Tensor cos = state.table.cos.index_select(0, state.positions);
  const Tensor sin = state.table.sin.index_select(0, state.positions).mul_(direction);
  const Tensor pairs = at::view_as_complex(x.to(at::kFloat).unflatten(2, {-1, 2}));
  return at::view_as_real(pairs * at::complex(cos, sin).unsqueeze(1)).flatten(2).to(x.scalar_type());
}

// in: q, kv, k_rope → q, k, v.
variable_list forward(const MlaState& state, const variable_list& in) {
  const int64_t tokens = in[0].size(0);
  if (in[0].is_cuda()) {
    const auto empty = [&](int64_t size) { return at::empty({tokens, state.heads, size}, in[0].options()); };
    const variable_list out{empty(state.nope + state.rope), empty(state.nope + state.rope), empty(state.value)};
    if (tokens > 0) {
      MARROW_CUDA_CALL(mla_rope_forward_cuda(state.args(), in[0], in[1], in[2], out[0], out[1], out[2]));
    }
    return out;
  }
  const variable_list query = in[0].unflatten(1, {state.heads, -1}).split_with_sizes({state.nope, state.rope}, 2);
  const variable_list latent = in[1].unflatten(1, {state.heads, -1}).split_with_sizes({state.nope, state.value}, 2);
  const Tensor key = turned(state, in[2].unsqueeze(1), 1).expand({tokens, state.heads, state.rope});
  return {at::cat({query[0], turned(state, query[1], 1)}, 2), at::cat({latent[0], key}, 2), latent[1].contiguous()};
}

// Gradients of q, k, v → those of q, kv, k_rope.
variable_list backward(const MlaState& state, const variable_list& d_out) {
  const Tensor dq = d_out[0].contiguous(), dk = d_out[1].contiguous(), dv = d_out[2].contiguous();
  if (dq.is_cuda()) {
    const auto empty = [&](int64_t width) { return at::empty({dq.size(0), width}, dq.options()); };
    const variable_list out{empty(state.heads * (state.nope + state.rope)),
                            empty(state.heads * (state.nope + state.value)), empty(state.rope)};
    if (dq.size(0) > 0) {
      MARROW_CUDA_CALL(mla_rope_backward_cuda(state.args(), dq, dk, dv, out[0], out[1], out[2]));
    }
    return out;
  }
  const variable_list query = dq.split_with_sizes({state.nope, state.rope}, 2);
  const variable_list key = dk.split_with_sizes({state.nope, state.rope}, 2);
  const Tensor d_rope = turned(state, key[1].sum(1, /*keepdim=*/true, at::kFloat), -1);
  return {at::cat({query[0], turned(state, query[1], -1)}, 2).flatten(1), at::cat({key[0], dv}, 2).flatten(1),
          d_rope.flatten(1).to(dq.scalar_type())};
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
  check_positions(table, positions, q.size(0), rope);
  // A copy even of a dense slice: the kernels' packs need a row that starts at a pack.
  const Tensor dense_rope = k_rope.detach().clone(at::MemoryFormat::Contiguous);
  const variable_list made = forward(state, {dense_q.detach(), dense_kv.detach(), dense_rope});
  const variable_list out = differentiable({dense_q, dense_kv, k_rope}, made,
                                           [state](const variable_list& d_out) { return backward(state, d_out); });
  return {out[0], out[1], out[2]};
}

}  // namespace marrow
