#include "ops/attention.h"

#include "ops/attention_cpu.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

enum class Kernel { kCpu, kCudnn, kFlash };

// How flash takes a layout: flattened tokens with offsets where there are documents, else [B, S].
struct FlashShape {
  std::optional<Tensor> offsets;  // int32 on the device
  int64_t longest = 0;
  std::optional<int64_t> window_left, window_right;
};

struct AttentionState {
  AttentionLayout layout;
  double scale;
  bool deterministic;
  bool training;  // a backward may follow
  Kernel kernel;
  FlashShape flash;

  // [T, H, D] as flash takes it, and back.
  Tensor for_flash(const Tensor& x) const { return flash.offsets ? x : by_sequence(x); }
  Tensor from_flash(const Tensor& x) const { return flash.offsets ? x : x.flatten(0, 1); }
  // [T, H, D] as cuDNN's entry takes it, [B, H, S, D], and back.
  Tensor for_cudnn(const Tensor& x) const { return by_sequence(x).transpose(1, 2); }
  static Tensor from_cudnn(const Tensor& x) { return x.transpose(1, 2).flatten(0, 1); }

  Tensor by_sequence(const Tensor& x) const { return x.unflatten(0, {layout.sequences, layout.seq_len}); }
};

// Document boundaries, or those of the sequences.
std::vector<int64_t> segments(const AttentionLayout& layout) {
  if (!layout.document_offsets.empty()) {
    return {layout.document_offsets.begin(), layout.document_offsets.end()};
  }
  std::vector<int64_t> offsets;
  for (int64_t s = 0; s <= layout.sequences; ++s) offsets.push_back(s * layout.seq_len);
  return offsets;
}

FlashShape flash_shape(const AttentionLayout& layout, at::Device device) {
  const auto& documents = layout.document_offsets;
  FlashShape shape;
  shape.longest = layout.seq_len;
  if (layout.window > 0) {
    shape.window_left = layout.window - 1;
    shape.window_right = 0;
  }
  if (documents.empty()) return shape;
  shape.longest = 1;
  for (size_t i = 1; i < documents.size(); ++i) {
    shape.longest = std::max<int64_t>(shape.longest, documents[i] - documents[i - 1]);
  }
  const Tensor host =
      at::empty({static_cast<int64_t>(documents.size())}, at::TensorOptions(at::kInt).pinned_memory(true));
  std::copy(documents.begin(), documents.end(), ints(host));
  shape.offsets = host.to(device, /*non_blocking=*/true);
  return shape;
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

// Each kernel's forward returns the output and then what its backward needs besides q, k and v; its
// backward takes {q, k, v, output, …}.
variable_list forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionState& state) {
  const auto [out, lse] = attention_forward_cpu({segments(state.layout), state.layout.window, state.scale}, q, k, v);
  return {out, lse};
}

std::array<Tensor, 3> backward_cpu(const variable_list& saved, const Tensor& d_out, const AttentionState& state) {
  return attention_backward_cpu({segments(state.layout), state.layout.window, state.scale}, saved[0], saved[1],
                                saved[2], saved[3], saved[4], d_out);
}

variable_list forward_cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionState& state) {
  const auto result = at::_scaled_dot_product_cudnn_attention(
      state.for_cudnn(q), state.for_cudnn(k), state.for_cudnn(v), {}, state.training, 0.0,
      /*is_causal=*/true, /*return_debug_mask=*/false, state.scale);
  return {state.from_cudnn(std::get<0>(result)), std::get<1>(result), std::get<6>(result), std::get<7>(result)};
}

std::array<Tensor, 3> backward_cudnn(const variable_list& saved, const Tensor& d_out, const AttentionState& state) {
  const int64_t seq_len = state.layout.seq_len;
  const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      state.for_cudnn(d_out), state.for_cudnn(saved[0]), state.for_cudnn(saved[1]), state.for_cudnn(saved[2]),
      state.for_cudnn(saved[3]), saved[4], saved[5], saved[6], {}, {}, {}, seq_len, seq_len, 0.0, /*is_causal=*/true,
      state.scale);
  return {state.from_cudnn(dq), state.from_cudnn(dk), state.from_cudnn(dv)};
}

variable_list forward_flash(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionState& state) {
  const FlashShape& flash = state.flash;
  const auto result =
      at::_flash_attention_forward(state.for_flash(q), state.for_flash(k), state.for_flash(v), flash.offsets,
                                   flash.offsets, flash.longest, flash.longest, 0.0, /*is_causal=*/true,
                                   /*return_debug_mask=*/false, state.scale, flash.window_left, flash.window_right);
  return {state.from_flash(std::get<0>(result)), std::get<1>(result), std::get<2>(result), std::get<3>(result)};
}

std::array<Tensor, 3> backward_flash(const variable_list& saved, const Tensor& d_out, const AttentionState& state) {
  const FlashShape& flash = state.flash;
  const Tensor offsets = flash.offsets.value_or(Tensor());
  const DeterministicScope scope(state.deterministic);
  const auto [dq, dk, dv] = at::_flash_attention_backward(
      state.for_flash(d_out), state.for_flash(saved[0]), state.for_flash(saved[1]), state.for_flash(saved[2]),
      state.for_flash(saved[3]), saved[4], offsets, offsets, flash.longest, flash.longest, 0.0, /*is_causal=*/true,
      saved[5], saved[6], state.scale, flash.window_left, flash.window_right);
  return {state.from_flash(dq), state.from_flash(dk), state.from_flash(dv)};
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionState& state) {
    // Below autograd's view tracking: a Function's output must not count as a view.
    const at::AutoDispatchBelowADInplaceOrView guard;
    constexpr std::array forwards{forward_cpu, forward_cudnn, forward_flash};
    const variable_list results = forwards[static_cast<size_t>(state.kernel)](q, k, v, state);
    variable_list kept{q, k, v};
    kept.insert(kept.end(), results.begin(), results.end());
    ctx->save_for_backward(kept);
    save_state(ctx, state);
    return results[0];
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_out) {
    const auto& state = saved_state<AttentionState>(ctx);
    constexpr std::array backwards{backward_cpu, backward_cudnn, backward_flash};
    const auto [dq, dk, dv] =
        backwards[static_cast<size_t>(state.kernel)](ctx->get_saved_variables(), d_out[0].contiguous(), state);
    return {dq, dk, dv, Tensor()};
  }
};

// fp32 on the GPU, for tests, and no tokens: every pair of tokens, gradients by ATen.
Tensor plain_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionLayout& layout, double scale) {
  const Tensor row = at::arange(q.size(0)), distance = row.unsqueeze(1) - row;
  const Tensor segment = at::searchsorted(at::tensor(segments(layout)), row, false, true);
  Tensor visible = distance.ge(0).logical_and(segment.unsqueeze(1).eq(segment));
  if (layout.window > 0) visible = visible.logical_and(distance.lt(layout.window));
  const int64_t group = q.size(1) / k.size(1);
  const Tensor keys = k.repeat_interleave(group, 1).permute({1, 2, 0});
  const Tensor values = v.repeat_interleave(group, 1).transpose(0, 1);
  const Tensor scores = at::matmul(q.transpose(0, 1), keys).mul(scale);
  const Tensor hidden = visible.logical_not().to(q.device());
  const Tensor weights = scores.masked_fill(hidden, -INFINITY).softmax(-1);
  return at::matmul(weights, values).transpose(0, 1).contiguous();
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionLayout& layout) {
  MARROW_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && q.size(2) == k.size(2) && k.size(1) == v.size(1) &&
                   k.size(1) > 0 && q.size(1) % k.size(1) == 0 && k.size(0) == q.size(0) && v.size(0) == q.size(0),
               ExitCode::kUsage, Fix("set num_attention_heads in config.json to a multiple of num_key_value_heads"),
               "attention: q {}, k {}, v {}", c10::str(q.sizes()), c10::str(k.sizes()), c10::str(v.sizes()));
  const int64_t tokens = layout.sequences * layout.seq_len;
  MARROW_CHECK(tokens == q.size(0) && layout.window >= 0, ExitCode::kUsage,
               Fix("describe the micro-batch's tokens in AttentionLayout"),
               "attention: {} tokens, layout of {} sequences of {}, window {}", q.size(0), layout.sequences,
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

Kernel choose_kernel(const Tensor& q, const Tensor& v, const AttentionLayout& layout, bool deterministic) {
  if (!q.is_cuda()) return Kernel::kCpu;
  // cuDNN's backward refuses a single query and key.
  const bool cudnn = layout.document_offsets.empty() && layout.window == 0 && !deterministic && layout.seq_len > 1;
  if (cudnn) return Kernel::kCudnn;
  MARROW_CHECK(q.size(2) == v.size(2) && q.size(2) % 8 == 0 && q.size(2) <= 256, ExitCode::kUsage,
               Fix("set data.mask_documents = false and train.deterministic = false"),
               "attention with documents, a window or determinism on the GPU needs equal head "
               "sizes of q, k and v, a multiple of 8 up to 256; they are {} and {}",
               q.size(2), v.size(2));
  return Kernel::kFlash;
}

Tensor with_dense_rows(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionLayout& layout, double scale,
                 bool deterministic) {
  check(q, k, v, layout);
  if (q.numel() == 0 || (q.is_cuda() && q.scalar_type() == at::kFloat)) {
    return plain_attention(q, k, v, layout, scale);
  }
  AttentionState state{layout, scale, deterministic, false, choose_kernel(q, v, layout, deterministic), {}};
  state.training = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  if (state.kernel == Kernel::kFlash) state.flash = flash_shape(layout, q.device());
  return AttentionFunction::apply(with_dense_rows(q), with_dense_rows(k), with_dense_rows(v), state);
}

}  // namespace marrow
