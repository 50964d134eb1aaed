// Experts' rows as operators pass them on, and with them their form in fp8: the kernel that makes rows which a product
// in fp8 reads makes that form too, so that nobody reads them once more for it.
#pragma once
#include "ops/fp8_quantize.h"

namespace marrow {

// A tensor's form in fp8 (quantize_expert_rows) on its way from the operator that made the tensor to the product that
// reads it, which takes it out. What is taken for any other tensor is made anew: a sum of two gradients, say.
struct Fp8Handover {
  at::Tensor of;  // a handle of its own on the tensor
  Fp8Matrix matrix;
};

// In bf16, and wherever a product stays in bf16, both handovers are null, and operators do as if there was no fp8.
struct ExpertRows {
  at::Tensor value;                                    // [≥ R, C], sorted by expert; behind the last's end anything
  at::Tensor offsets;                                  // [E] int32: end row of each expert
  std::shared_ptr<Fp8Handover> fp8 = nullptr;          // of value
  std::shared_ptr<Fp8Handover> d_value_fp8 = nullptr;  // of its gradient: filled by the backward of who reads value
};

// For rows that this product of the experts' weight reads: null unless it is in fp8.
std::shared_ptr<Fp8Handover> make_handover(const Parameter& weight, Fp8Product product, const at::Tensor& rows);

// The memory of the form of `rows` for a kernel to write, where there is a handover and the rows are on a GPU.
Fp8Matrix memory_for(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows);

// Fills a handover, if there is one: with what a kernel wrote, or where it wrote none, made here.
void hand_over(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows, const at::Tensor& offsets,
               const Fp8Matrix& written);

// The form of `rows`: the one that was handed over, else made now.
Fp8Matrix take_over(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows, const at::Tensor& offsets);

}  // namespace marrow
