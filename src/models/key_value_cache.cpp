#include "models/key_value_cache.h"

namespace marrow {

at::Tensor KeyValueCache::attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 double scale) {
  const int64_t fresh = q.size(0);
  const int64_t total = length_ + fresh;
  MARROW_CHECK(total <= capacity_, ExitCode::kUsage, Fix("ask for fewer tokens"), "{} tokens exceed the cache of {}",
               total, capacity_);
  at::Tensor& keys = keys_[layer];
  at::Tensor& values = values_[layer];
  if (!keys.defined()) {
    keys = at::empty({capacity_, k.size(1), k.size(2)}, k.options());
    values = at::empty({capacity_, v.size(1), v.size(2)}, v.options());
  }
  keys.narrow(0, length_, fresh).copy_(k);
  values.narrow(0, length_, fresh).copy_(v);

  const int64_t group = q.size(1) / k.size(1);
  const auto heads_first = [&](const at::Tensor& cache) {  // [Hq, total, D] fp32
    return cache.narrow(0, 0, total).repeat_interleave(group, 1).transpose(0, 1).to(at::kFloat);
  };
  const at::Tensor queries = q.transpose(0, 1).to(at::kFloat);  // [Hq, T, D]
  at::Tensor scores = at::matmul(queries, heads_first(keys).transpose(1, 2)).mul_(scale);
  const at::Tensor row = at::arange(length_, total, scores.options()).unsqueeze(1);
  const at::Tensor column = at::arange(total, scores.options()).unsqueeze(0);
  scores.masked_fill_(column > row, -std::numeric_limits<float>::infinity());
  const at::Tensor out = at::matmul(at::softmax(scores, -1), heads_first(values));
  return out.transpose(0, 1).contiguous().to(q.scalar_type());
}

}  // namespace marrow
