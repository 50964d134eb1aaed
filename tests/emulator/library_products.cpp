// What CUTLASS and cuBLASLt compute on a GPU, by ATen: so that operators which use it run to their end.
#include "ops/pch.h"
// After the precompiled header:
#include "ops/cuda_kernels.h"
#include "ops/fp8_quantize.h"

namespace marrow {
namespace {

using at::Tensor;

Tensor tensor(const View& view, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::from_blob(view.data, sizes, at::TensorOptions(dtype));
}
Tensor rows_of(const View& view) { return tensor(view, {view.rows, view.width}, at::kBFloat16); }

// Calls body(e, its rows' begin and end) for experts that have rows.
template <typename Body>
void for_experts(const View& offsets, const Body& body) {
  const int32_t* ends = offsets;
  for (int64_t e = 0, begin = 0; e < offsets.elements; begin = ends[e++]) {
    if (ends[e] > begin) body(e, begin, int64_t{ends[e]});
  }
}

}  // namespace

void grouped_forward_cuda(View rows, View weight, View offsets, View out, View) {
  const Tensor w = tensor(weight, {offsets.elements, out.width, rows.width}, at::kBFloat16);
  for_experts(offsets, [&](int64_t e, int64_t begin, int64_t end) {
    rows_of(out).slice(0, begin, end).copy_(at::mm(rows_of(rows).slice(0, begin, end), w[e].t()));
  });
}

void grouped_input_grad_cuda(View dy, View weight, View offsets, View d_rows, View) {
  const Tensor w = tensor(weight, {offsets.elements, dy.width, d_rows.width}, at::kBFloat16);
  for_experts(offsets, [&](int64_t e, int64_t begin, int64_t end) {
    rows_of(d_rows).slice(0, begin, end).copy_(at::mm(rows_of(dy).slice(0, begin, end), w[e]));
  });
}

void grouped_weight_grad_cuda(View dy, View rows, View offsets, View grad, View) {
  const Tensor sums = tensor(grad, {offsets.elements, dy.width, rows.width}, at::kFloat);
  for_experts(offsets, [&](int64_t e, int64_t begin, int64_t end) {
    const auto part = [&](const View& view) { return rows_of(view).slice(0, begin, end).to(at::kFloat); };
    sums[e].add_(at::mm(part(dy).t(), part(rows)));
  });
}

void grouped_fp8_cuda(View rows, View rows_scale, View weight, View weight_scale, View offsets, View out, View) {
  const int64_t n = out.width, k = rows.width, down = (n + kFp8Block - 1) / kFp8Block,
                across = (k + kFp8Block - 1) / kFp8Block;
  const Tensor x = tensor(rows, {rows.rows, k}, at::kFloat8_e4m3fn);
  const Tensor w = tensor(weight, {offsets.elements, n, k}, at::kFloat8_e4m3fn);
  const Tensor w_scales = tensor(weight_scale, {offsets.elements, across, down}, at::kFloat);
  const Tensor x_scales = tensor(rows_scale, {rows.rows * across}, at::kFloat);  // of each expert [across, its rows]
  for_experts(offsets, [&](int64_t e, int64_t begin, int64_t end) {
    const Tensor scales = x_scales.slice(0, begin * across, end * across).view({across, end - begin}).t();
    const Tensor product =
        at::mm(dequantize({x.slice(0, begin, end), scales}), dequantize({w[e], w_scales[e].t()}).t());
    rows_of(out).slice(0, begin, end).copy_(product);
  });
}

void grouped_fp8_weight_grad_cuda(View dy, View dy_scale, View x, View x_scale, View offsets, View grad, View) {
  const Tensor sums = tensor(grad, {offsets.elements, dy.rows, x.rows}, at::kFloat);
  const auto part = [](const View& data, const View& scale, int64_t begin, int64_t end) {  // of an expert, in blocks
    const Tensor scales = tensor(scale, {data.width / kFp8Block, data.rows}, at::kFloat).t();
    return dequantize(
        {tensor(data, {data.rows, data.width}, at::kFloat8_e4m3fn).slice(1, begin * kFp8Block, end * kFp8Block),
         scales.slice(1, begin, end)});
  };
  int64_t done = 0;
  for_experts(offsets, [&](int64_t e, int64_t begin, int64_t end) {
    const int64_t next = done + (end - begin + kFp8Block - 1) / kFp8Block;
    sums[e].addmm_(part(dy, dy_scale, done, next), part(x, x_scale, done, next).t());
    done = next;
  });
}

void fp8_weight_grad_cuda(void*, View dy, View dy_scale, View x, View x_scale, View grad, View) {
  const auto whole = [](const View& data, const View& scale) {
    const int64_t blocks = (data.width + kFp8Block - 1) / kFp8Block;
    return dequantize({tensor(data, {data.rows, data.width}, at::kFloat8_e4m3fn),
                       tensor(scale, {blocks, data.rows}, at::kFloat).t()});
  };
  tensor(grad, {dy.rows, x.rows}, at::kFloat).addmm_(whole(dy, dy_scale), whole(x, x_scale).t());
}

}  // namespace marrow
