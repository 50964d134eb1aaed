#include "ops/swiglu.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

constexpr int64_t kGrain = 32768;  // elements for one thread

// Runs body(row, its weight) for all rows on all threads.
template <typename Body>
void for_rows(const Tensor& gate_up, const Tensor& row_weight, const Body& body) {
  const float* weights = floats(row_weight);
  const int64_t grain = std::max<int64_t>(1, 2 * kGrain / gate_up.size(1));
  at::parallel_for(0, gate_up.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      body(row, _mm256_set1_ps(weights == nullptr ? 1.0f : weights[row]));
    }
  });
}

// All fp32.
void forward_cpu(const Tensor& gate_up, const Tensor& row_weight, const Tensor& out) {
  const int64_t width = out.size(1);
  for_rows(gate_up, row_weight, [&](int64_t row, __m256 weight) {
    const float* gate = floats(gate_up) + row * 2 * width;
    float* target = floats(out) + row * width;
    for (int64_t c = 0; c < width; c += 8) {
      const __m256 g = load8(gate + c, width - c);
      const __m256 scaled = _mm256_mul_ps(load8(gate + width + c, width - c), weight);
      store8(target + c, _mm256_mul_ps(_mm256_mul_ps(g, sigmoid8(g)), scaled), width - c);
    }
  });
}

void backward_cpu(const Tensor& gate_up, const Tensor& row_weight, const Tensor& d_out, const Tensor& d_gate_up,
                  const Tensor& d_row_weight) {
  const int64_t width = d_out.size(1);
  for_rows(gate_up, row_weight, [&](int64_t row, __m256 weight) {
    const float* gate = floats(gate_up) + row * 2 * width;
    const float* d = floats(d_out) + row * width;
    float* d_gate = floats(d_gate_up) + row * 2 * width;
    __m256 dot = _mm256_setzero_ps();
    for (int64_t c = 0; c < width; c += 8) {
      const int64_t n = width - c;
      const __m256 g = load8(gate + c, n), u = load8(gate + width + c, n), grad = load8(d + c, n);
      const __m256 sigmoid = sigmoid8(g);
      const __m256 silu = _mm256_mul_ps(g, sigmoid);
      const __m256 slope = _mm256_fmadd_ps(silu, _mm256_sub_ps(_mm256_set1_ps(1.0f), sigmoid), sigmoid);
      const __m256 scaled = _mm256_mul_ps(grad, weight);
      dot = _mm256_fmadd_ps(grad, _mm256_mul_ps(silu, u), dot);
      store8(d_gate + c, _mm256_mul_ps(_mm256_mul_ps(scaled, u), slope), n);
      store8(d_gate + width + c, _mm256_mul_ps(scaled, silu), n);
    }
    if (d_row_weight.defined()) floats(d_row_weight)[row] = sum8(dot);
  });
}

// of_out: for the GPU.
Tensor forward(const Tensor& gate_up, const Tensor& row_weight, const Tensor& out, const ExpertRowsView& of_out) {
  if (out.numel() == 0) return out;
  if (out.is_cuda()) {
    MARROW_CUDA_CALL(swiglu_forward_cuda(gate_up, row_weight, out, of_out));
    return out;
  }
  const Tensor out32 = out.to(at::kFloat);
  forward_cpu(gate_up.to(at::kFloat), row_weight, out32);
  return at::Tensor(out).copy_(out32);
}

// → gradient of gate_up, handed over in fp8 too where that is asked for; fills d_row_weight, if defined.
Tensor backward(const ExpertRows& rows, const Tensor& row_weight, const Tensor& d_out, const Tensor& d_row_weight) {
  const Tensor& gate_up = rows.value;
  const Tensor d_gate_up = at::empty_like(gate_up);
  if (d_out.numel() == 0) {
    if (d_row_weight.defined()) d_row_weight.zero_();
    return d_gate_up;
  }
  Fp8Matrix written;
  if (d_out.is_cuda()) {
    // Blocks must not reach from the gate's half into the other.
    if (d_out.size(1) % kFp8Block == 0) written = memory_for(rows.d_value_fp8, d_gate_up);
    MARROW_CUDA_CALL(swiglu_backward_cuda(gate_up, row_weight, d_out, d_gate_up, d_row_weight,
                                          {written.data, written.scale, rows.offsets}));
  } else {
    const Tensor d32 = d_gate_up.to(at::kFloat);
    backward_cpu(gate_up.to(at::kFloat), row_weight, d_out.to(at::kFloat), d32, d_row_weight);
    at::Tensor(d_gate_up).copy_(d32);
  }
  hand_over(rows.d_value_fp8, d_gate_up, rows.offsets, written);
  return d_gate_up;
}

// GPT-OSS' factors on the CPU, fp32: clamped gate, sigmoid(alpha · gate), and clamped up plus 1.
struct ClampedParts {
  Tensor gate, sigmoid, up;
  ClampedParts(const Tensor& gate_up, double alpha, double limit)
      : gate(gate_up.slice(1, 0, {}, 2).clamp_max(limit)),
        sigmoid((gate * alpha).sigmoid_()),
        up(gate_up.slice(1, 1, {}, 2).clamp(-limit, limit).add_(1.0)) {}
};

Tensor clamped_forward(const Tensor& gate_up, const Tensor& row_weight, double alpha, double limit,
                       const Tensor& offsets) {
  const Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  if (out.numel() > 0 && out.is_cuda()) {
    MARROW_CUDA_CALL(clamped_swiglu_forward_cuda(gate_up, row_weight, out, offsets, float(alpha), float(limit)));
    return out;
  }
  const ClampedParts of(gate_up.to(at::kFloat), alpha, limit);
  return of.gate.mul(of.sigmoid).mul_(of.up).mul_(row_weight.unsqueeze(1)).to(out.scalar_type());
}

// → gradients of gate_up and row_weight.
variable_list clamped_backward(const Tensor& gate_up, const Tensor& row_weight, const Tensor& d_out, double alpha,
                               double limit, const Tensor& offsets) {
  const Tensor d_gate_up = at::empty_like(gate_up), d_weight = at::empty_like(row_weight);
  if (d_out.numel() > 0 && d_out.is_cuda()) {
    MARROW_CUDA_CALL(clamped_swiglu_backward_cuda(gate_up, row_weight, d_out, d_gate_up, d_weight, offsets,
                                                  float(alpha), float(limit)));
    return {d_gate_up, d_weight};
  }
  const Tensor x = gate_up.to(at::kFloat), d = d_out.to(at::kFloat), d_weighted = d * row_weight.unsqueeze(1);
  const ClampedParts of(x, alpha, limit);
  const Tensor glu = of.gate * of.sigmoid, slope = of.sigmoid * (1 + alpha * of.gate * (1 - of.sigmoid));
  d_gate_up.slice(1, 0, {}, 2).copy_(d_weighted * of.up * slope * x.slice(1, 0, {}, 2).le(limit));
  d_gate_up.slice(1, 1, {}, 2).copy_(d_weighted * glu * x.slice(1, 1, {}, 2).abs().le(limit));
  return {d_gate_up, (d * glu).mul_(of.up).sum(1)};
}

// reader: of the result in fp8, or none.
ExpertRows activate(const ExpertRows& gate_up, const Tensor& row_weight, const Parameter* reader) {
  ExpertRows in = gate_up;
  in.value = gate_up.value.detach().contiguous();
  const Tensor weights = row_weight.defined() ? row_weight.detach().contiguous() : row_weight;
  check_tensor("swiglu: gate_up", in.value, kWorkingDtype, {-1, in.value.size(-1) / 2 * 2});
  if (weights.defined()) check_tensor("swiglu: row_weight", weights, at::kFloat, {in.value.size(0)});
  const bool weights_differ = row_weight.defined() && row_weight.requires_grad();
  ExpertRows out{at::empty({in.value.size(0), in.value.size(1) / 2}, in.value.options()), gate_up.offsets};
  if (reader != nullptr) out.fp8 = make_handover(*reader, Fp8Product::kExpertForward, out.value);
  const Fp8Matrix written = memory_for(out.fp8, out.value);
  forward(in.value, weights, out.value, {written.data, written.scale, gate_up.offsets});
  hand_over(out.fp8, out.value, out.offsets, written);
  in.fp8 = nullptr;
  out.value = differentiable({gate_up.value, row_weight}, {out.value}, [=](const variable_list& d) -> variable_list {
    const Tensor d_weights = weights_differ ? at::empty_like(weights) : Tensor();
    return {backward(in, weights, d[0].contiguous(), d_weights), d_weights};
  })[0];
  return out;
}

}  // namespace

Tensor clamped_swiglu(const Tensor& gate_up, const Tensor& row_weight, double alpha, double limit,
                      const Tensor& offsets) {
  const Tensor x = gate_up.detach(), weights = row_weight.detach();
  check_tensor("clamped_swiglu: gate_up", x, kWorkingDtype, {-1, gate_up.size(-1) / 2 * 2});
  check_tensor("clamped_swiglu: row_weight", weights, at::kFloat, {gate_up.size(0)});
  return differentiable({gate_up, row_weight}, {clamped_forward(x, weights, alpha, limit, offsets)},
                        [=](const variable_list& d_out) -> variable_list {
                          return clamped_backward(x, weights, d_out[0].contiguous(), alpha, limit, offsets);
                        })[0];
}

Tensor swiglu(const Tensor& gate_up, const Tensor& row_weight, const Tensor& offsets) {
  return activate({gate_up, offsets}, row_weight, nullptr).value;
}

ExpertRows swiglu(const ExpertRows& gate_up, const Tensor& row_weight, const Parameter& reader) {
  return activate(gate_up, row_weight, &reader);
}

}  // namespace marrow
