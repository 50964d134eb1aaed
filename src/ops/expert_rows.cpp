#include "ops/expert_rows.h"

namespace marrow {

std::shared_ptr<Fp8Handover> make_handover(const Parameter& weight, Fp8Product product, const at::Tensor& rows) {
  if (weight.fp8 == nullptr) return nullptr;
  const int64_t outer = weight.value.size(1) * weight.value.size(2) / rows.size(1);
  if (!fp8_wins(weight, product, rows, outer)) return nullptr;
  return std::make_shared<Fp8Handover>(Fp8Handover{weight_grad_in_fp8(weight, rows), {}, {}});
}

Fp8Matrix memory_for(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows) {
  return handover != nullptr && !handover->both && rows.is_cuda() ? expert_rows_memory(rows, rows.size(0))
                                                                  : Fp8Matrix{};
}

void hand_over(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows, const at::Tensor& offsets,
               const Fp8Matrix& written) {
  if (handover == nullptr || handover->both) return;
  // A handle of its own: autograd keeps a gradient as it is only where nobody else holds the same handle.
  handover->of = rows.variable_data();
  handover->forms = written.data.defined() ? Fp8Pair{written, {}} : quantize_expert_rows(rows, offsets, true, false);
}

Fp8Pair take_over(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows, const at::Tensor& offsets,
                  bool direct, bool transposed) {
  if (handover != nullptr) {
    const at::Tensor of = std::exchange(handover->of, {});
    const Fp8Pair forms = std::exchange(handover->forms, {});
    const bool all = (!direct || forms.rows.data.defined()) && (!transposed || forms.transposed.data.defined());
    // It kept the memory alive: what is there now is the same tensor.
    if (all && of.defined() && of.is_alias_of(rows) && of.data_ptr() == rows.data_ptr() && of.sizes() == rows.sizes())
      return forms;
  }
  MARROW_CHECK(rows.numel() == 0 || rows.storage().nbytes() > 0, ExitCode::kUsage,
               Fix("set train.dtype = \"bf16\", and report this"),
               "rows {} that were made in fp8 alone are not taken over", c10::str(rows.sizes()));
  return quantize_expert_rows(rows, offsets, direct, transposed);
}

}  // namespace marrow
