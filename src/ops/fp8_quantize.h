// E4M3 with a scale for each block of 128 (train.dtype = "fp8"): matrices, the weights' copies, and the products of
// which `linear` and `grouped_linear` are made.
#pragma once
#include "ops/fp8_scale.h"
#include "ops/parameter.h"

namespace marrow {

// Element (r, c) is data[r, c] · scale[r / height, c / 128]; height is 1 in activations and gradients, 128 in weights.
// The scales are fp32 powers of two (fp8_scale.h), in the order in memory that the products want.
struct Fp8Matrix {
  at::Tensor data;   // [R, C] or [E, R, C] E4M3
  at::Tensor scale;  // [.., ⌈R / height⌉, ⌈C / 128⌉]
};

// A matrix [R, C], and [C, R] with the scales along what was its rows: what a product over the rows reads.
struct Fp8Pair {
  Fp8Matrix rows, transposed;
};

// x [R, C] fp32 or bf16, 1 × 128. One read makes what is asked for; the other stays undefined. On the GPU x is bf16,
// contiguous, and R and C divide by 16 (R only for `transposed`).
Fp8Pair quantize_rows(const at::Tensor& x, bool rows, bool transposed);

// The same of experts' rows [≥ R, C], offsets [E] int32; R is any. On the GPU the rows' scales, [R · ⌈C / 128⌉], are
// those of an expert's rows after another's, and rows from offsets[E-1] on are undefined. transposed: [C, P], an
// expert's columns from a block on, with zeros up to the next one's; P = expert_columns(rows, E), undefined behind the
// last's. source [R] int32: of rows x[source[r]], zeros for -1.
Fp8Pair quantize_expert_rows(const at::Tensor& x, const at::Tensor& offsets, bool rows, bool transposed,
                             const at::Tensor& source = {});
// Memory for the form of `rows` rows as wide as like's; on a GPU.
Fp8Matrix expert_rows_memory(const at::Tensor& like, int64_t rows);
inline int64_t expert_columns(int64_t rows, int64_t experts) { return (rows / kFp8Block + experts) * kFp8Block; }

// weight [N, K] or [E, N, K], 128 × 128, both ways round. On the GPU bf16; N and K divide by 16.
Fp8Pair quantize_weight(const at::Tensor& weight);

at::Tensor dequantize(const Fp8Matrix& matrix);  // fp32

// a [M, K] · b [N, K]ᵀ → [M, N] bf16 or fp32, summed in fp32. On the CPU the dequantised matrices are multiplied.
at::Tensor fp8_product(const Fp8Matrix& a, const Fp8Matrix& b, at::ScalarType dtype);

// grad [N, K] fp32 += dy [N, R] · x [K, R]ᵀ, each the `transposed` of a gradient and of an input.
void accumulate_fp8(const at::Tensor& grad, const Fp8Matrix& dy, const Fp8Matrix& x);

// The copies of a weight, made when they are first asked for. Whoever changes the weight calls `stale`: the
// parameter store where it gathers new values (an optimizer step, a load), and where it takes a layer's memory away.
class Fp8Weight {
 public:
  // `at_any_size`: also where bf16 is faster, for tests and measurements.
  explicit Fp8Weight(bool at_any_size = false) : at_any_size_(at_any_size) {}
  const Fp8Pair& of(const at::Tensor& value) {
    if (!made_.rows.data.defined()) made_ = quantize_weight(value);
    return made_;
  }
  void stale() { made_ = {}; }
  bool at_any_size() const { return at_any_size_; }

 private:
  bool at_any_size_;
  Fp8Pair made_;
};

enum class Fp8Product { kForward, kInputGrad, kWeightGrad, kExpertForward, kExpertInputGrad, kExpertWeightGrad };

// Whether the product of `rows` [R, inner] (x, or the output's gradient) that has `outer` columns is to be in fp8: the
// weight has copies, and on the GPU the sizes fit and are such that fp8 is faster, by the table in the .cpp. A weight's
// gradient is [inner, outer], or the other way round.
bool fp8_wins(const Parameter& weight, Fp8Product product, const at::Tensor& rows, int64_t outer);
// Whether the gradient of a weight, of experts too, is wanted and in fp8 where the weight reads `rows`: then its
// product keeps their form in fp8 alone. `rows` may also be the gradient of what it makes of them.
bool weight_grad_in_fp8(const Parameter& weight, const at::Tensor& rows);

// The least rows (of an expert, on average), columns and elements of the weight of a product in fp8 on the GPU.
struct Fp8Bound {
  const char* product;
  int64_t rows, columns, elements;
};
const std::array<Fp8Bound, 6>& fp8_bounds();                                         // by Fp8Product
bool fp8_pays(Fp8Product product, int64_t rows, int64_t columns, int64_t elements);  // whether they are reached

}  // namespace marrow
