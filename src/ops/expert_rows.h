// Experts' rows as operators pass them on, and with them their form in fp8: the kernel that makes rows which a product
// in fp8 reads makes that form too, so that nobody reads them once more for it.
#pragma once
#include "ops/fp8_quantize.h"

namespace marrow {

// A tensor's forms in fp8 (quantize_expert_rows) on their way from the operator that made the tensor to the product
// that reads it, which takes them out. What is taken for any other tensor is made anew: a sum of two gradients, say.
struct Fp8Handover {
  // The weight's gradient is in fp8 too: nobody reads the tensor itself. A gather on the GPU makes both forms, and a
  // tensor without memory; others leave the forms to the product, which makes both at one reading.
  bool both = false;
  at::Tensor of;  // a handle of its own on the tensor
  Fp8Pair forms;
};

// In bf16, and wherever a product stays in bf16, both handovers are null, and operators do as if there was no fp8.
struct ExpertRows {
  at::Tensor value;                                    // [≥ R, C], sorted by expert; behind the last's end anything
  at::Tensor offsets;                                  // [E] int32: end row of each expert
  std::shared_ptr<Fp8Handover> fp8 = nullptr;          // of value
  std::shared_ptr<Fp8Handover> d_value_fp8 = nullptr;  // of its gradient: filled by the backward of who reads value

  bool only_in_fp8() const { return fp8 != nullptr && fp8->both; }  // nobody keeps value for a backward
};

// For rows that this product of the experts' weight reads: null unless it is in fp8.
std::shared_ptr<Fp8Handover> make_handover(const Parameter& weight, Fp8Product product, const at::Tensor& rows);

// The memory of the form of `rows` for a kernel to write, where there is a handover for it and the rows are on a GPU.
Fp8Matrix memory_for(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows);

// Fills a handover, if there is one: with what a kernel wrote, or where it wrote none, made here.
void hand_over(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows, const at::Tensor& offsets,
               const Fp8Matrix& written);

// The forms of `rows` that are wanted: those handed over, else made now.
Fp8Pair take_over(const std::shared_ptr<Fp8Handover>& handover, const at::Tensor& rows, const at::Tensor& offsets,
                  bool direct, bool transposed);

}  // namespace marrow
