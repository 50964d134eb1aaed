// What layers keep of the tokens generated so far: keys and values, or a state.
#pragma once
#include "ops/gated_delta_rule.h"
#include "ops/short_convolution.h"

namespace marrow {

// One sequence. Layers call `attend` in order; `advance` once all layers have seen the new tokens.
class KeyValueCache {
 public:
  KeyValueCache(int64_t layers, int64_t capacity)
      : keys_(layers), values_(layers), recurrences_(layers), capacity_(capacity) {}

  // Appends keys [T, Hkv, D] and values [T, Hkv, Dv] of layer `layer`, then attends causally from
  // the T new queries [T, Hq, D]. Returns [T, Hq, Dv]. window and sinks [Hq] (or undefined) as attention() has them.
  at::Tensor attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                    int64_t window = 0, const at::Tensor& sinks = {}) {
    const int64_t fresh = q.size(0), total = length_ + fresh;
    MARROW_CHECK(total <= capacity_, ExitCode::kUsage, Fix("ask for fewer tokens"), "{} tokens exceed the cache of {}",
                 total, capacity_);
    const auto extended = [&](at::Tensor& cache, const at::Tensor& added) {  // [Hq, total, D] fp32
      if (!cache.defined()) cache = at::empty({capacity_, added.size(1), added.size(2)}, added.options());
      cache.narrow(0, length_, fresh).copy_(added);
      const int64_t group = q.size(1) / added.size(1);
      return cache.narrow(0, 0, total).repeat_interleave(group, 1).transpose(0, 1).to(at::kFloat);
    };
    const at::Tensor queries = q.transpose(0, 1).to(at::kFloat);  // [Hq, T, D]
    at::Tensor scores = at::matmul(queries, extended(keys_[layer], k).transpose(1, 2)).mul_(scale);
    const at::Tensor positions = at::arange(total, scores.options());
    const at::Tensor own = positions.narrow(0, length_, fresh).unsqueeze(1);
    scores.masked_fill_(positions > own, -INFINITY);
    if (window > 0) scores.masked_fill_(positions <= own - window, -INFINITY);
    if (sinks.defined()) {
      scores = at::cat({scores, sinks.to(at::kFloat).view({-1, 1, 1}).expand({-1, fresh, 1})}, -1);
    }
    const at::Tensor shares = at::softmax(scores, -1).narrow(-1, 0, total);
    const at::Tensor out = at::matmul(shares, extended(values_[layer], v));
    return out.transpose(0, 1).contiguous().to(q.scalar_type());
  }

  // short_convolution and gated_delta_rule of the T new tokens, after those before them.
  at::Tensor convolve(int64_t layer, const at::Tensor& x, const Parameter& weight) {  // x [T, C]
    at::Tensor& rows = recurrences_[layer].rows;
    if (!rows.defined()) rows = at::zeros({1, weight.value.size(1) - 1, x.size(1)}, x.options());
    const at::Tensor out = short_convolution(x, weight, starts_of(x), rows);
    rows = at::cat({rows, x.unsqueeze(0)}, 1).slice(1, x.size(0)).contiguous();
    return out;
  }
  at::Tensor recur(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                   const at::Tensor& beta) {
    at::Tensor& state = recurrences_[layer].state;
    GatedDeltaRule result = gated_delta_rule(q, k, v, g, beta, starts_of(q), state);
    state = std::move(result.state);
    return std::move(result.out);
  }
  void advance(int64_t tokens) { length_ += tokens; }
  int64_t length() const { return length_; }

 private:
  struct Recurrence {  // undefined before the first token
    at::Tensor rows;   // [1, K − 1, C], the last inputs of the convolution
    at::Tensor state;  // [1, Hv, Dk, Dv]
  };
  static at::Tensor starts_of(const at::Tensor& x) {
    return at::tensor({int64_t{0}, x.size(0)}, at::kInt).to(x.device());
  }

  std::vector<at::Tensor> keys_, values_;  // [capacity, Hkv, D]
  std::vector<Recurrence> recurrences_;
  int64_t capacity_;
  int64_t length_ = 0;
};

}  // namespace marrow
