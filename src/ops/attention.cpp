#include "ops/attention.h"

#include "ops/attention_cpu.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

enum class Kernel { kCpu, kCudnn, kFlash };

struct AttentionState {
  AttentionLayout layout;
  double scale;
  bool deterministic;
  bool training;  // a backward may follow
  Kernel kernel;
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

// [T, H, D] seen as [B, H, S, D], which is how cuDNN's entry takes it.
Tensor by_head(const Tensor& x, const AttentionLayout& layout) {
  return x.unflatten(0, {layout.sequences, layout.seq_len}).transpose(1, 2);
}

Tensor by_token(const Tensor& x) { return x.transpose(1, 2).flatten(0, 1); }

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

// How flash takes a layout: flattened tokens with offsets where there are documents, else [B, S].
struct FlashShape {
  Tensor offsets;  // int32 on the device, or undefined
  int64_t longest;
  std::optional<int64_t> window_left, window_right;
  bool flattened;

  Tensor shaped(const Tensor& x, const AttentionLayout& layout) const {
    return flattened ? x : x.unflatten(0, {layout.sequences, layout.seq_len});
  }
  Tensor tokens(const Tensor& x) const { return flattened ? x : x.flatten(0, 1); }
};

// `offsets`: those of the forward, or undefined to copy them to the device.
FlashShape flash_shape(const AttentionLayout& layout, Tensor offsets, at::Device device) {
  const auto& documents = layout.document_offsets;
  FlashShape shape{std::move(offsets), layout.seq_len, {}, {}, !documents.empty()};
  if (layout.window > 0) {
    shape.window_left = layout.window - 1;
    shape.window_right = 0;
  }
  if (!shape.flattened) return shape;
  shape.longest = 1;
  for (size_t i = 1; i < documents.size(); ++i) {
    shape.longest = std::max<int64_t>(shape.longest, documents[i] - documents[i - 1]);
  }
  if (shape.offsets.defined()) return shape;
  const Tensor host = at::empty({static_cast<int64_t>(documents.size())},
                                at::TensorOptions(at::kInt).pinned_memory(true));
  std::copy(documents.begin(), documents.end(), host.data_ptr<int32_t>());
  shape.offsets = host.to(device, /*non_blocking=*/true);
  return shape;
}

CpuAttention cpu_attention(const AttentionState& state) {
  return {segments(state.layout), state.layout.window, state.scale};
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionState& state) {
    save_state(ctx, state);
    // Below autograd's view tracking: a Function's output must not count as a view.
    const at::AutoDispatchBelowADInplaceOrView guard;
    switch (state.kernel) {
      case Kernel::kCpu:
        return forward_cpu(ctx, q, k, v, state);
      case Kernel::kCudnn:
        return forward_cudnn(ctx, q, k, v, state);
      case Kernel::kFlash:
        return forward_flash(ctx, q, k, v, state);
    }
    return {};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_out) {
    const auto& state = saved_state<AttentionState>(ctx);
    const auto saved = ctx->get_saved_variables();
    const Tensor d = d_out[0].contiguous();
    switch (state.kernel) {
      case Kernel::kCpu:
        return backward_cpu(saved, d, state);
      case Kernel::kCudnn:
        return backward_cudnn(saved, d, state);
      case Kernel::kFlash:
        return backward_flash(saved, d, state);
    }
    return {};
  }

  static Tensor forward_cpu(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                            const AttentionState& state) {
    const auto [out, lse] = attention_forward_cpu(cpu_attention(state), q, k, v);
    ctx->save_for_backward({q, k, v, out, lse});
    return out;
  }

  static variable_list backward_cpu(const variable_list& saved, const Tensor& d_out,
                                    const AttentionState& state) {
    const auto [dq, dk, dv] = attention_backward_cpu(cpu_attention(state), saved[0], saved[1],
                                                     saved[2], saved[3], saved[4], d_out);
    return {dq, dk, dv, Tensor()};
  }

  static Tensor forward_cudnn(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                              const Tensor& v, const AttentionState& state) {
    const AttentionLayout& layout = state.layout;
    const auto result = at::_scaled_dot_product_cudnn_attention(
        by_head(q, layout), by_head(k, layout), by_head(v, layout), {}, state.training, 0.0,
        /*is_causal=*/true, /*return_debug_mask=*/false, state.scale);
    const Tensor out = by_token(std::get<0>(result));
    ctx->save_for_backward(
        {q, k, v, out, std::get<1>(result), std::get<6>(result), std::get<7>(result)});
    return out;
  }

  static variable_list backward_cudnn(const variable_list& saved, const Tensor& d_out,
                                      const AttentionState& state) {
    const AttentionLayout& layout = state.layout;
    const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        by_head(d_out, layout), by_head(saved[0], layout), by_head(saved[1], layout),
        by_head(saved[2], layout), by_head(saved[3], layout), saved[4], saved[5], saved[6], {}, {},
        {}, layout.seq_len, layout.seq_len, 0.0, /*is_causal=*/true, state.scale);
    return {by_token(dq), by_token(dk), by_token(dv), Tensor()};
  }

  static Tensor forward_flash(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                              const Tensor& v, const AttentionState& state) {
    const AttentionLayout& layout = state.layout;
    const FlashShape shape = flash_shape(layout, {}, q.device());
    std::optional<Tensor> offsets;
    if (shape.flattened) offsets = shape.offsets;
    const auto result = at::_flash_attention_forward(
        shape.shaped(q, layout), shape.shaped(k, layout), shape.shaped(v, layout), offsets, offsets,
        shape.longest, shape.longest, 0.0, /*is_causal=*/true,
        /*return_debug_mask=*/false, state.scale, shape.window_left, shape.window_right);
    const Tensor out = shape.tokens(std::get<0>(result));
    ctx->save_for_backward({q, k, v, out, std::get<1>(result), std::get<2>(result),
                            std::get<3>(result), shape.offsets});
    return out;
  }

  static variable_list backward_flash(const variable_list& saved, const Tensor& d_out,
                                      const AttentionState& state) {
    const AttentionLayout& layout = state.layout;
    const FlashShape shape = flash_shape(layout, saved[7], d_out.device());
    const DeterministicScope scope(state.deterministic);
    const auto [dq, dk, dv] = at::_flash_attention_backward(
        shape.shaped(d_out, layout), shape.shaped(saved[0], layout), shape.shaped(saved[1], layout),
        shape.shaped(saved[2], layout), shape.shaped(saved[3], layout), saved[4], shape.offsets,
        shape.offsets, shape.longest, shape.longest, 0.0, /*is_causal=*/true, saved[5], saved[6],
        state.scale, shape.window_left, shape.window_right);
    return {shape.tokens(dq), shape.tokens(dk), shape.tokens(dv), Tensor()};
  }
};

// [T, T] bool: row i sees column j. On the host.
Tensor visible_pairs(const AttentionLayout& layout, int64_t tokens) {
  Tensor visible = at::zeros({tokens, tokens}, at::kBool);
  const std::vector<int64_t> offsets = segments(layout);
  for (size_t s = 1; s < offsets.size(); ++s) {
    for (int64_t row = offsets[s - 1]; row < offsets[s]; ++row) {
      const int64_t first =
          layout.window == 0 ? offsets[s - 1] : std::max(offsets[s - 1], row - layout.window + 1);
      std::fill_n(visible.data_ptr<bool>() + row * tokens + first, row + 1 - first, true);
    }
  }
  return visible;
}

// fp32 on the GPU, for tests, and no tokens: every pair of tokens, gradients by ATen.
Tensor plain_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                       const AttentionLayout& layout, double scale) {
  const int64_t group = q.size(1) / k.size(1);
  const Tensor keys = k.repeat_interleave(group, 1).permute({1, 2, 0});
  const Tensor values = v.repeat_interleave(group, 1).transpose(0, 1);
  const Tensor hidden = visible_pairs(layout, q.size(0)).logical_not().to(q.device());
  const Tensor scores = at::matmul(q.transpose(0, 1), keys).mul(scale);
  const Tensor weights = scores.masked_fill(hidden, -INFINITY).softmax(-1);
  return at::matmul(weights, values).transpose(0, 1).contiguous();
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionLayout& layout) {
  MARROW_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && q.size(2) == k.size(2) &&
                   k.size(1) == v.size(1) && k.size(1) > 0 && q.size(1) % k.size(1) == 0 &&
                   k.size(0) == q.size(0) && v.size(0) == q.size(0),
               ExitCode::kUsage,
               Fix("set num_attention_heads in config.json to a multiple of num_key_value_heads"),
               "attention: q {}, k {}, v {}", c10::str(q.sizes()), c10::str(k.sizes()),
               c10::str(v.sizes()));
  const int64_t tokens = layout.sequences * layout.seq_len;
  MARROW_CHECK(tokens == q.size(0) && layout.window >= 0, ExitCode::kUsage,
               Fix("describe the micro-batch's tokens in AttentionLayout"),
               "attention: {} tokens, layout of {} sequences of {}, window {}", q.size(0),
               layout.sequences, layout.seq_len, layout.window);
  const auto& offsets = layout.document_offsets;
  if (offsets.empty()) return;
  const bool ascending = std::is_sorted(offsets.begin(), offsets.end());
  MARROW_CHECK(offsets.front() == 0 && offsets.back() == tokens && ascending, ExitCode::kUsage,
               Fix("give cumulative document offsets from 0 to the number of tokens"),
               "attention: document offsets from {} to {} for {} tokens, {}", offsets.front(),
               offsets.back(), tokens, ascending ? "ascending" : "not ascending");
  for (int64_t s = 0; s < layout.sequences; ++s) {
    MARROW_CHECK(std::binary_search(offsets.begin(), offsets.end(), s * layout.seq_len),
                 ExitCode::kUsage, Fix("start a document at each sequence"),
                 "attention: no document starts at token {}, where sequence {} does",
                 s * layout.seq_len, s);
  }
}

Kernel choose_kernel(const Tensor& q, const Tensor& v, const AttentionLayout& layout,
                     bool deterministic) {
  if (!q.is_cuda()) return Kernel::kCpu;
  // cuDNN's backward refuses a single query and key.
  const bool cudnn =
      layout.document_offsets.empty() && layout.window == 0 && !deterministic && layout.seq_len > 1;
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

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionLayout& layout,
                 double scale, bool deterministic) {
  check(q, k, v, layout);
  if (q.numel() == 0 || (q.is_cuda() && q.scalar_type() == at::kFloat)) {
    return plain_attention(q, k, v, layout, scale);
  }
  const bool training =
      at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  return AttentionFunction::apply(with_dense_rows(q), with_dense_rows(k), with_dense_rows(v),
                                  AttentionState{layout, scale, deterministic, training,
                                                 choose_kernel(q, v, layout, deterministic)});
}

}  // namespace marrow
