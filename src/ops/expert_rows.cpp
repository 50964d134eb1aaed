#include "ops/expert_rows.h"

namespace marrow {

std::shared_ptr<Fp8Handover> make_handover(const Parameter& weight, Fp8Product product, const at::Tensor& rows) {
  if (weight.fp8 == nullptr) return nullptr;
  const int64_t outer = weight.value.size(1) * weight.value.size(2) / rows.size(1);
  return fp8_wins(weight, product, rows, outer) ? std::make_shared<Fp8Handover>() : nullptr;
}

Fp8Matrix memory_for(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows) {
  return handover != nullptr && rows.is_cuda() ? expert_rows_memory(rows) : Fp8Matrix{};
}

void hand_over(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows, const at::Tensor& offsets,
               const Fp8Matrix& written) {
  if (handover == nullptr) return;
  // A handle of its own: autograd keeps a gradient as it is only where nobody else holds the same handle.
  *handover = {rows.variable_data(), written.data.defined() ? written : quantize_expert_rows(rows, offsets)};
}

Fp8Matrix take_over(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows, const at::Tensor& offsets) {
  if (handover != nullptr) {
    const Fp8Handover left = std::exchange(*handover, {});
    // It kept the memory alive: what is there now is the same tensor.
    if (left.of.defined() && left.of.data_ptr() == rows.data_ptr() && left.of.sizes() == rows.sizes()) {
      return left.matrix;
    }
  }
  return quantize_expert_rows(rows, offsets);
}

}  // namespace marrow
