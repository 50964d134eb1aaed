#include "ops/fp8_quantize.h"

#include <bit>

#include "ops/device.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

int64_t blocks(int64_t n) { return (n + kFp8Block - 1) / kFp8Block; }

std::vector<int64_t> with_ends(const Tensor& x, int64_t rows, int64_t columns) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[sizes.size() - 2] = rows;
  sizes.back() = columns;
  return sizes;
}

// Blocks of `height` rows of x [.., R, C].
Fp8Matrix quantize_cpu(const Tensor& x, int64_t height) {
  const Tensor in = x.to(at::kFloat).contiguous();
  const int64_t rows = in.size(-2), columns = in.size(-1), down = (rows + height - 1) / height,
                across = blocks(columns);
  const Fp8Matrix out{at::empty(in.sizes(), in.options().dtype(at::kFloat8_e4m3fn)),
                      at::empty(with_ends(in, down, across), in.options())};
  const float* from = floats(in);
  float* scales = floats(out.scale);
  auto* data = out.data.data_ptr<c10::Float8_e4m3fn>();
  at::parallel_for(0, out.scale.numel() / std::max<int64_t>(across, 1), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin * across; block < end * across; ++block) {
      const int64_t line = block / across, first = line / down * rows + line % down * height;
      const int64_t last = std::min(first + height, (line / down + 1) * rows);
      const int64_t left = block % across * kFp8Block, right = std::min(left + kFp8Block, columns);
      uint32_t most = 0;
      for (int64_t r = first; r < last; ++r) {
        for (int64_t c = left; c < right; ++c) {
          most = std::max(most, std::bit_cast<uint32_t>(from[r * columns + c]) & 0x7fffffffu);
        }
      }
      const uint32_t scale = fp8_scale_bits(most);
      const auto inverse = std::bit_cast<float>(fp8_inverse_bits(scale));
      scales[block] = std::bit_cast<float>(scale);
      for (int64_t r = first; r < last; ++r) {
        for (int64_t c = left; c < right; ++c) data[r * columns + c] = from[r * columns + c] * inverse;
      }
    }
  });
  return out;
}

Tensor fp8_like(const Tensor& x, at::IntArrayRef sizes) {
  return at::empty(sizes, x.options().dtype(at::kFloat8_e4m3fn));
}

Tensor floats_like(const Tensor& x, at::IntArrayRef sizes) { return at::empty(sizes, x.options().dtype(at::kFloat)); }

// Experts' rows of x [R, C], each expert's from a block on → [P, C], with zeros between.
Tensor spread_over_blocks(const Tensor& x, const Tensor& offsets) {
  const Tensor out = at::zeros({expert_columns(x.size(0), offsets.size(0)), x.size(1)}, x.options());
  for (int64_t e = 0, begin = 0, to = 0; e < offsets.size(0); ++e) {
    const int64_t count = ints(offsets)[e] - begin;
    out.narrow(0, to, count).copy_(x.narrow(0, begin, count));
    begin += count;
    to += blocks(count) * kFp8Block;
  }
  return out;
}

Fp8Matrix expert_columns_memory(const Tensor& like, int64_t rows, int64_t experts) {
  const int64_t padded = expert_columns(rows, experts), columns = like.size(1);
  return {fp8_like(like, {columns, padded}), floats_like(like, {blocks(padded), columns}).t()};
}

void check_gpu(const char* what, const Tensor& x, bool rows) {
  check_tensor(what, x, at::kBFloat16, x.sizes());
  MARROW_CHECK(x.size(-1) % 16 == 0 && (!rows || x.size(-2) % 16 == 0), ExitCode::kUsage,
               Fix("choose sizes divisible by 16, or set train.dtype = \"bf16\""), "{} {} is not divisible by 16", what,
               c10::str(x.sizes()));
}

}  // namespace

Fp8Pair quantize_rows(const Tensor& x, bool rows, bool transposed) {
  Fp8Pair out;
  if (x.is_cpu()) {
    if (rows) out.rows = quantize_cpu(x, 1);
    if (transposed) out.transposed = quantize_cpu(x.t(), 1);
    return out;
  }
  check_gpu("fp8 rows", x, transposed);
  const int64_t r = x.size(0), c = x.size(1);
  if (rows) out.rows = {fp8_like(x, {r, c}), floats_like(x, {blocks(c), r}).t()};
  if (transposed) out.transposed = {fp8_like(x, {c, r}), floats_like(x, {blocks(r), c}).t()};
  MARROW_CUDA_CALL(quantize_rows_cuda(x, out.rows.data, out.rows.scale, out.transposed.data, out.transposed.scale));
  return out;
}

Fp8Matrix expert_rows_memory(const Tensor& like, int64_t rows) {
  check_gpu("fp8 rows of experts", like, false);
  return {fp8_like(like, {rows, like.size(1)}), floats_like(like, {rows * blocks(like.size(1))})};
}

Fp8Pair quantize_expert_rows(const Tensor& x, const Tensor& offsets, bool rows, bool transposed, const Tensor& source) {
  Fp8Pair out;
  if (x.is_cpu()) {
    Tensor of = x;
    if (source.defined()) {
      of = x.index_select(0, source.clamp_min(0)).masked_fill_(source.lt(0).unsqueeze(1), 0);
    }
    if (rows) out.rows = quantize_cpu(of, 1);
    if (transposed) out.transposed = quantize_cpu(spread_over_blocks(of, offsets).t(), 1);
    return out;
  }
  const int64_t count = (source.defined() ? source : x).size(0), experts = offsets.size(0);
  if (rows) out.rows = expert_rows_memory(x, count);
  if (transposed) out.transposed = expert_columns_memory(x, count, experts);
  MARROW_CUDA_CALL(quantize_expert_rows_cuda(x, source, offsets, out.rows.data, out.rows.scale, out.transposed.data,
                                             out.transposed.scale, blocks(expert_columns(count, experts))));
  return out;
}

Fp8Pair quantize_weight(const Tensor& weight) {
  if (weight.is_cpu()) {
    const Fp8Matrix own = quantize_cpu(weight, kFp8Block);
    return {own, {own.data.transpose(-1, -2).contiguous(), own.scale.transpose(-1, -2).contiguous()}};
  }
  check_gpu("fp8 weight", weight, true);
  const bool experts = weight.dim() == 3;
  // Of a matrix the rows are in order (cuBLAS), of experts the columns (CUTLASS).
  const auto make = [&](int64_t r, int64_t c) {
    const int64_t down = blocks(r), across = blocks(c);
    const Tensor scale = experts ? floats_like(weight, {weight.size(0), across, down}).transpose(1, 2)
                                 : floats_like(weight, {down, across});
    return Fp8Matrix{fp8_like(weight, with_ends(weight, r, c)), scale};
  };
  const int64_t n = weight.size(-2), k = weight.size(-1);
  const Fp8Pair out{make(n, k), make(k, n)};
  const auto strides = [](const Tensor& scale) { return Fp8ScaleStrides{scale.stride(-2), scale.stride(-1)}; };
  MARROW_CUDA_CALL(quantize_weight_cuda(weight, n, k, out.rows.data, out.rows.scale, strides(out.rows.scale),
                                        out.transposed.data, out.transposed.scale, strides(out.transposed.scale)));
  return out;
}

Tensor dequantize(const Fp8Matrix& matrix) {
  Tensor scale = matrix.scale;
  const auto spread = [&](int64_t dim, int64_t size) {
    if (scale.size(dim) != size) scale = scale.repeat_interleave(kFp8Block, dim).narrow(dim, 0, size);
  };
  spread(-2, matrix.data.size(-2));
  spread(-1, matrix.data.size(-1));
  return matrix.data.to(at::kFloat).mul_(scale);
}

Tensor fp8_product(const Fp8Matrix& a, const Fp8Matrix& b, at::ScalarType dtype) {
  if (a.data.is_cpu()) return at::mm(dequantize(a), dequantize(b).t()).to(dtype);
  return at::_scaled_mm(a.data, b.data.t(), a.scale, b.scale.t(), {}, {}, dtype);
}

void accumulate_fp8(const Tensor& grad, const Fp8Matrix& dy, const Fp8Matrix& x) {
  const at::NoGradGuard no_grad;
  if (grad.is_cpu()) {
    at::Tensor(grad).addmm_(dequantize(dy), dequantize(x).t());
    return;
  }
  const Tensor workspace = at::empty({kDenseFp8Workspace}, at::device(grad.device()).dtype(at::kByte));
  MARROW_CUDA_CALL(fp8_weight_grad_cuda(cublas_lt_handle(), dy.data, dy.scale, x.data, x.scale, grad, workspace));
}

bool weight_grad_in_fp8(const Parameter& weight, const Tensor& rows) {
  if (weight.fp8 == nullptr || !weight.grad.defined() || !at::GradMode::is_enabled()) return false;
  const auto product = weight.value.dim() == 3 ? Fp8Product::kExpertWeightGrad : Fp8Product::kWeightGrad;
  return fp8_wins(weight, product, rows, weight.value.size(-2) * weight.value.size(-1) / rows.size(1));
}

const std::array<Fp8Bound, 6>& fp8_bounds() {
  // Measured: docs/benchmarks.md. Quantising costs by rows and what is summed over, the product gains by columns too.
  static constexpr std::array<Fp8Bound, 6> bounds = {{{"forward", 4096, 1536, 3 << 20},
                                                      {"input gradient", 4096, 1536, 3 << 20},
                                                      {"weight gradient", 2048, 0, 8 << 20},
                                                      {"experts forward", 64, 512, 3 << 20},
                                                      {"experts input gradient", 64, 768, 3 << 19},
                                                      {"experts weight gradient", 4096, 0, 14 << 20}}};
  return bounds;
}

bool fp8_pays(Fp8Product product, int64_t rows, int64_t columns, int64_t elements) {
  const Fp8Bound& least = fp8_bounds()[static_cast<size_t>(product)];
  return rows >= least.rows && columns >= least.columns && elements >= least.elements;
}

bool fp8_wins(const Parameter& weight, Fp8Product product, const Tensor& rows, int64_t outer) {
  if (weight.fp8 == nullptr || rows.is_cpu()) return weight.fp8 != nullptr;
  const bool experts = product >= Fp8Product::kExpertForward;
  const int64_t inner = rows.size(1);
  if (rows.scalar_type() != at::kBFloat16 || rows.size(0) == 0 || inner % 16 != 0 || outer % 16 != 0 ||
      (!experts && rows.size(0) % 16 != 0)) {
    return false;
  }
  // A weight's scales are rows of blocks along what is summed over: libtorch takes whole 16 bytes, without gaps.
  if (!experts && product != Fp8Product::kWeightGrad && blocks(inner) % 4 != 0) return false;
  const int64_t each = rows.size(0) / (experts ? weight.value.size(0) : 1);
  return weight.fp8->at_any_size() || fp8_pays(product, each, outer, outer * inner);
}

}  // namespace marrow
