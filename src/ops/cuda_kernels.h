// The CUDA kernels of the operators, as NAME.cpp calls them and NAME.cu defines them. They run on
// ATen's current stream. Tensors are contiguous device memory, fp32 or bf16 where no comment says
// more; a View that may be undefined says "or none". Torch-free, as .cu files are.
#pragma once
#include <cstdint>

namespace marrow {

// A tensor without torch: rows of `width` elements each.
struct View {
  View() = default;
  template <typename Tensor>
  View(const Tensor& tensor) {  // NOLINT: calls pass tensors as they are
    if (!tensor.defined()) return;
    data = tensor.data_ptr();
    elements = tensor.numel();
    rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    width = tensor.dim() < 2 || rows == 0 ? 1 : elements / rows;
    bf16 = tensor.element_size() == 2;
  }
  template <typename T>
  operator T*() const {  // NOLINT: kernels take typed pointers
    return static_cast<T*>(data);
  }
  bool defined() const { return data != nullptr; }

  void* data = nullptr;
  int64_t elements = 0, rows = 0, width = 0;
  bool bf16 = false;
};

// The scalars of an AdamW step, as the kernels use them.
struct AdamwFactors {
  float decay;  // 1 - lr · weight_decay
  float one_minus_beta1, beta2, one_minus_beta2;
  float step_size;            // lr / (1 - beta1^step)
  float inverse_correction2;  // 1 / √(1 - beta2^step)
  float eps;
  bool zero_grad;
};

// working: bf16 or none.
void adamw_update_cuda(View master, View working, View grad, View exp_avg, View exp_avg_sq, View grad_scale,
                       const AdamwFactors& factors);

// As add_expert_bias_: rows [R, N] += bias[its expert] · row_weights [R], or 1. Rows of no expert stay as they are.
void add_expert_bias_cuda(View rows, View bias, View offsets, View row_weights);

// d_row_weights[r] = Σ_n d_rows[r, n] · bias[its expert, n], 0 for a row of no expert.
void expert_bias_row_weight_grad_cuda(View d_rows, View bias, View offsets, View d_row_weights);

// grad [E, N] fp32 += the sums of the experts' rows of d_rows · row_weights (or 1), in a fixed order.
void expert_bias_grad_cuda(View d_rows, View row_weights, View offsets, View grad);

// grad[ids[t]] += d_out[t] with fp32 atomics.
void embedding_backward_cuda(View ids, View d_out, View grad);

// The same in the order given: sorted_ids ascends, and position[i] int64 is sorted_ids[i]'s token.
void embedding_backward_sorted_cuda(View sorted_ids, View position, View d_out, View grad);

constexpr int64_t kPairsPerBlock = 2048;  // of a counting sort's block

// By what a pair of experts [T, k] is sorted, where groups of `each` neighbours belong together: its expert's group.
// -1, for no row, where that is none of the groups, or (each > 1) an earlier pair of the token has the same one.
constexpr int32_t pair_sort_key(const int32_t* experts, int64_t pair, int64_t top_k, int32_t groups, int32_t each) {
  const int32_t group = experts[pair] < 0 ? groups : experts[pair] / each;
  if (group >= groups) return -1;
  if (each == 1) return group;
  for (int64_t other = pair - pair % top_k; other < pair; ++other) {
    if (experts[other] >= 0 && experts[other] / each == group) return -1;
  }
  return group;
}

// Sorts the pairs of experts [T, k] by that key, stable; block_rows [⌈pairs / kPairsPerBlock⌉, groups] is scratch.
// Outputs as in ExpertPermutation, all int32.
void sort_pairs_cuda(View experts, int64_t each, View block_rows, View offsets, View source_of_row, View rows_of_source,
                     View slot_of_row);

// The products of grouped_linear in bf16: rows and d_rows [R, K], weight [E, N, K], out and dy [R, N], grad [E, N, K]
// fp32, which is added to; offsets [E] int32, E at most 1024. workspace: kGroupedWorkspace bytes, read until the kernel
// ends.
constexpr int64_t kGroupedWorkspace = 256 << 10;
void grouped_forward_cuda(View rows, View weight, View offsets, View out, View workspace);
void grouped_input_grad_cuda(View dy, View weight, View offsets, View d_rows, View workspace);
void grouped_weight_grad_cuda(View dy, View rows, View offsets, View grad, View workspace);

// Quantises x [R, C] as quantize_rows: data and its scales, transposed and its scales, each pair may be none.
void quantize_rows_cuda(View x, View data, View scale, View transposed, View transposed_scale);

// The same as quantize_expert_rows, offsets [E] int32; tiles: the columns' blocks. source [R] int32, or none: of rows
// x[source[r]], zero for -1.
void quantize_expert_rows_cuda(View x, View source, View offsets, View data, View scale, View columns,
                               View columns_scale, int64_t tiles);

// What a kernel that makes experts' rows knows of them. offsets, or none: rows from its last entry on, a number that
// the device alone knows, stay unwritten. data and scale, or neither: the rows, then bf16 and of a width divisible by
// 16, are also wanted in E4M3 (quantize_expert_rows), by offsets.
struct ExpertRowsView {
  View data, scale, offsets;
};

struct Fp8ScaleStrides {
  int64_t row = 0, column = 0;
};

// weight [E, N, K] or [N, K] as quantize_weight; the scales of a further expert follow without a gap.
void quantize_weight_cuda(View weight, int64_t n, int64_t k, View data, View scale, Fp8ScaleStrides strides,
                          View transposed, View transposed_scale, Fp8ScaleStrides transposed_strides);

// out [R, N] bf16 = rows [R, K] · weight[e] [N, K]ᵀ, as quantised by these; workspace as above.
void grouped_fp8_cuda(View rows, View rows_scale, View weight, View weight_scale, View offsets, View out,
                      View workspace);

// grad [E, N, K] fp32 += dyᵀ · x of each expert's rows, of dy [N, P] and x [K, P] as quantize_expert_rows turned them.
void grouped_fp8_weight_grad_cuda(View dy, View dy_scale, View x, View x_scale, View offsets, View grad,
                                  View workspace);

// grad [N, K] fp32 += dy [N, R] · x [K, R]ᵀ, as quantize_rows turned them. handle: cuBLASLt's.
constexpr int64_t kDenseFp8Workspace = 32 << 20;
void fp8_weight_grad_cuda(void* handle, View dy, View dy_scale, View x, View x_scale, View grad, View workspace);

// Row r of logits [R, V]: losses[r] = -log softmax(row)[targets[r]], 0 where the target is -1 (NaN where it is outside
// the vocabulary). with_gradient overwrites the row by gradient_scale · d loss / d logits.
void cross_entropy_cuda(View logits, View targets, View losses, float gradient_scale, bool with_gradient);

// momentum_buffer = lerp(momentum_buffer, g, 1 - momentum); direction (bf16) = lerp(g, momentum_buffer, momentum), g =
// *grad_scale · grad. A gated step (scale 0 or not finite) leaves the buffer alone and gives zeros.
void muon_momentum_cuda(View grad, View momentum_buffer, View direction, View grad_scale, float momentum,
                        bool zero_grad);

// master = decay · master - step_size · orthogonal (bf16) unless gated; working bf16 or none.
void muon_apply_cuda(View master, View working, View orthogonal, View grad_scale, float decay, float step_size);

// Most rows of the `partials` of their backwards: blocks, each with its own sum for the weight's
// gradient. 8 for each of an H200's 132 multiprocessors.
constexpr int64_t kNormPartials = 1056;

struct QkNormRopeArgs {
  View qkv;                  // [T, (Hq + 2·Hkv)·D]
  View q_norm, k_norm;       // [D], none in split_and_rotate
  const float* cos;          // [P, D/2]
  const float* sin;          // [P, D/2]
  const int32_t* positions;  // [T]
  int64_t q_heads, kv_heads;
  int64_t head_size;  // D, even, at most 512
  float eps;
};

// q [T, Hq, D] and k [T, Hkv, D].
void qk_norm_rope_forward_cuda(const QkNormRopeArgs& args, View q, View k);

// d_qkv from dq, dk, dv. q_norm_grad and k_norm_grad [D] fp32, or none, += sums of partials
// [blocks, 2D] fp32, in a fixed order.
void qk_norm_rope_backward_cuda(const QkNormRopeArgs& args, View dq, View dk, View dv, View d_qkv, View partials,
                                View q_norm_grad, View k_norm_grad);

// As split_and_rotate, without norms: qkv to q and k; and back, from dq, dk and dv to args.qkv.
void split_and_rotate_forward_cuda(const QkNormRopeArgs& args, View q, View k);
void split_and_rotate_backward_cuda(const QkNormRopeArgs& args, View dq, View dk, View dv);

// normed = rms_norm(x), or where there is a residual of sum = x + residual, which is written too.
void rms_norm_forward_cuda(View x, View residual, View weight, View sum, View normed, float eps, float offset);

// dx = gradient through the norm of x + d_sum (or none). weight_grad [H] (or none) += the sum of
// partials [blocks, H] fp32, in a fixed order.
void rms_norm_backward_cuda(View x, View d_normed, View d_sum, View weight, View dx, View partials, View weight_grad,
                            float eps, float offset);

constexpr int64_t kSumBlocks = 1056;  // partial sums; fixed, so that the order of adding is too

// *total += Σ flat[i]²; partial [kSumBlocks] fp64 is scratch.
void add_sum_of_squares_cuda(View flat, View partial, View total);

constexpr int64_t kRouterMaxExperts = 512;
constexpr int64_t kRouterMaxTopK = 32;
constexpr int64_t kRouterMaxExpertGroups = 32;

// Sizes of a router call: tokens T in `groups` equal groups.
struct RouterShape {
  int64_t tokens, experts, top_k, groups;
  bool normalize, forced;
  float scale;
  bool sigmoid;
  int64_t expert_groups, top_groups;
};

// Blocks of each group, all groups alike: partial_sums below has groups · this rows.
int64_t router_blocks_per_group(const RouterShape& shape);

// logits [T, E]. selection_bias [E] or none. lse [T], counts [G, E] zeroed, partial_sums [G · blocks, E + 1] scratch;
// the rest as in RouterOutput.
void router_forward_cuda(const RouterShape& shape, View logits, View selection_bias, View lse, View experts,
                         View weights, View counts, View partial_sums, View probability_sums, View z_sum);

// d_weights [T, k] or none; balance_gradient [G, E] or none. d_logits: fp32 [T, E], or bf16
// [T, 2E]: rounded values in the first E columns, what rounding lost in the rest.
void router_backward_cuda(const RouterShape& shape, View logits, View lse, View experts, View weights, View d_weights,
                          View balance_gradient, float z_loss_gradient, View d_logits);

struct MlaRopeArgs {
  const float* cos;                  // [P, Dr/2]
  const float* sin;                  // [P, Dr/2]
  const int32_t* positions;          // [T]
  int64_t heads, nope, rope, value;  // Hq, Dn, Dr, Dv; sizes even
};

// As mla_rope: q, kv and k_rope to q_out, k_out and v_out; and back.
void mla_rope_forward_cuda(const MlaRopeArgs& args, View q, View kv, View k_rope, View q_out, View k_out, View v_out);
void mla_rope_backward_cuda(const MlaRopeArgs& args, View dq_out, View dk_out, View dv_out, View dq, View dkv,
                            View dk_rope);

// As gated_delta_rule, Dk and Dv multiples of 8 up to 128. Rows of q, k and v start at multiples of 16 bytes, `stride`
// elements apart; the tensors from `factors` on are scratch in the sizes that gated_delta_rule_chunks gives, [places ·
// Hv, …]: a place for each chunk of each segment, some of them unused.
struct GatedDeltaRuleArgs {
  View q, k, v, g, beta, starts, initial;  // initial: or none
  int64_t q_stride, k_stride, v_stride;
  int64_t tokens, segments, key_heads, value_heads, key_size, value_size;
  View factors;        // [3, rows] fp32: e^(G_end − G) / |k|, e^G / |q| / √Dk, e^G
  View w, u;           // [rows, size]
  View states;         // [size, size], before each chunk
  View inverse;        // [rows, rows], of I + A; the backward's, as what follows, else none
  View d_u, d_states;  // d_states: after each chunk
};
struct GatedDeltaRuleChunks {
  int64_t places, rows, size;  // rows: tokens of a chunk; size: Dk and Dv, rounded up
};
constexpr int64_t kDeltaRowsBf16 = 64, kDeltaRowsFp32 = 32;
inline GatedDeltaRuleChunks gated_delta_rule_chunks(const GatedDeltaRuleArgs& args) {
  const int64_t rows = args.q.bf16 ? kDeltaRowsBf16 : kDeltaRowsFp32;
  const int64_t size = args.key_size > args.value_size ? args.key_size : args.value_size;
  return {args.tokens / rows + args.segments, rows, size <= 64 ? 64 : 128};
}
void gated_delta_rule_forward_cuda(const GatedDeltaRuleArgs& args, View out, View state);
struct GatedDeltaRuleGradients {
  View q, k, v, g, beta, initial;  // dense
};
void gated_delta_rule_backward_cuda(const GatedDeltaRuleArgs& args, View d_out, View d_state,
                                    const GatedDeltaRuleGradients& grads);

// Tokens in parts of equal size: a thread works on some channels of a part.
struct ShortConvolutionArgs {
  const void *x, *weight, *halo;  // [T, C], [C, taps], [segments, taps - 1, C] or none; one dtype
  const int32_t* starts;          // [segments + 1]
  int64_t tokens, channels, taps, segments;
  int64_t parts, part_tokens;
};
constexpr int64_t kConvolutionParts = 128;  // at most

// As short_convolution. d_halo (or none) is zeroed; weight_grad (or none) += the sum of partials [parts, C · taps]
// fp32, in a fixed order.
void short_convolution_forward_cuda(const ShortConvolutionArgs& args, View out);
void short_convolution_backward_cuda(const ShortConvolutionArgs& args, View d_out, View dx, View d_halo, View partials,
                                     View weight_grad);

// As gated_rms_norm, rows of at most 256. weight_grad (or none) += the sum of partials [blocks, D] fp32.
constexpr int64_t kGatedNormMaxSize = 256;
void gated_rms_norm_forward_cuda(View x, View gate, View weight, View out, float eps);
void gated_rms_norm_backward_cuda(View x, View gate, View weight, View d_out, View dx, View d_gate, View partials,
                                  View weight_grad, float eps);

// out[r] = x[source[r]], zero where source is -1; source int32. With offsets (experts' rows) rows_of_source [T, m] is
// its inverse, else it may be none. With data x and out are aligned to 16 bytes.
void gather_rows_cuda(View x, View source, View rows_of_source, View out, const ExpertRowsView& of_out = {});

// out[t] = residual[t] (or 0) + Σ_j rows[rows_of_source[t, j]] over the indices of rows that exist; sums in fp32.
void sum_rows_cuda(View rows, View rows_of_source, View residual, View out);

// out[i] = values[index[i]], 0 where index is -1.
void gather_values_cuda(View values, View index, View out);

// gate_up [R, 2I], row_weight [R] or none, out [R, I]. d_gate_up goes into E4M3 only where I divides by 128.
void swiglu_forward_cuda(View gate_up, View row_weight, View out, const ExpertRowsView& of_out);
void swiglu_backward_cuda(View gate_up, View row_weight, View d_out, View d_gate_up,
                          View d_row_weight,  // or none
                          const ExpertRowsView& of_d_gate_up);

// As clamped_swiglu: gate_up [R, 2I] in turn, row_weight [R]; offsets or none.
void clamped_swiglu_forward_cuda(View gate_up, View row_weight, View out, View offsets, float alpha, float limit);
void clamped_swiglu_backward_cuda(View gate_up, View row_weight, View d_out, View d_gate_up, View d_row_weight,
                                  View offsets, float alpha, float limit);

}  // namespace marrow
