#include "ops/attention_gpu.h"

#include "ops/op_tools.h"

namespace marrow {
namespace {

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

// What flash takes: flattened tokens with offsets where there are pieces, else [B, S].
struct FlashArguments {
  std::optional<Tensor> offsets;
  std::optional<int64_t> left, right;

  explicit FlashArguments(const GpuAttention& attention) {
    if (attention.pieces.defined()) offsets = attention.pieces;
    if (attention.left < 0) return;
    left = attention.left;
    if (attention.causal) right = 0;
  }
  Tensor in(const Tensor& x) const { return offsets ? x.squeeze(0) : x; }
  Tensor out(const Tensor& x) const { return offsets ? x.unsqueeze(0) : x; }
  int64_t rows(const GpuAttention& attention, const Tensor& x) const { return offsets ? attention.longest : x.size(1); }
};

// cuDNN's entry takes [B, H, S, D].
Tensor heads_first(const Tensor& x) { return x.transpose(1, 2); }

}  // namespace

void GpuAttention::set_pieces(const std::vector<int32_t>& offsets, at::Device device) {
  longest = 1;
  for (size_t i = 1; i < offsets.size(); ++i) longest = std::max<int64_t>(longest, offsets[i] - offsets[i - 1]);
  const Tensor host =
      at::empty({static_cast<int64_t>(offsets.size())}, at::TensorOptions(at::kInt).pinned_memory(true));
  std::copy(offsets.begin(), offsets.end(), ints(host));
  pieces = host.to(device, /*non_blocking=*/true);
}

bool needs_flash(const Tensor& q, const Tensor& v, bool masked, bool deterministic) {
  if (!masked && !deterministic) return false;
  MARROW_CHECK(q.size(2) == v.size(2) && q.size(2) % 8 == 0 && q.size(2) <= 256, ExitCode::kUsage,
               Fix("set data.mask_documents = false and train.deterministic = false"),
               "attention with documents, a window or determinism on the GPU needs equal head "
               "sizes of q, k and v, a multiple of 8 up to 256; they are {} and {}",
               q.size(2), v.size(2));
  return true;
}

variable_list attention_gpu_forward(const GpuAttention& attention, const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!attention.flash) {
    const auto result = at::_scaled_dot_product_cudnn_attention(heads_first(q), heads_first(k), heads_first(v), {},
                                                                attention.backward, 0.0, attention.causal,
                                                                /*return_debug_mask=*/false, attention.scale);
    const Tensor& lse = std::get<1>(result);
    return {heads_first(std::get<0>(result)), lse.defined() && lse.dim() == 4 ? lse.squeeze(3) : lse,
            std::get<6>(result), std::get<7>(result)};
  }
  const FlashArguments flash(attention);
  const auto result =
      at::_flash_attention_forward(flash.in(q), flash.in(k), flash.in(v), flash.offsets, flash.offsets,
                                   flash.rows(attention, q), flash.rows(attention, k), 0.0, attention.causal,
                                   /*return_debug_mask=*/false, attention.scale, flash.left, flash.right);
  return {flash.out(std::get<0>(result)), flash.out(std::get<1>(result)), std::get<2>(result), std::get<3>(result)};
}

std::array<Tensor, 3> attention_gpu_backward(const GpuAttention& attention, const variable_list& saved,
                                             const Tensor& d_out) {
  const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
  if (!attention.flash) {
    const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        heads_first(d_out), heads_first(q), heads_first(k), heads_first(v), heads_first(out), lse.unsqueeze(3),
        saved[5], saved[6], {}, {}, {}, q.size(1), k.size(1), 0.0, attention.causal, attention.scale);
    return {heads_first(dq), heads_first(dk), heads_first(dv)};
  }
  const FlashArguments flash(attention);
  const DeterministicScope scope(attention.deterministic);
  const Tensor offsets = flash.offsets.value_or(Tensor());
  const auto [dq, dk, dv] = at::_flash_attention_backward(
      flash.in(d_out), flash.in(q), flash.in(k), flash.in(v), flash.in(out), flash.in(lse), offsets, offsets,
      flash.rows(attention, q), flash.rows(attention, k), 0.0, attention.causal, saved[5], saved[6], attention.scale,
      flash.left, flash.right);
  return {flash.out(dq), flash.out(dk), flash.out(dv)};
}

}  // namespace marrow
