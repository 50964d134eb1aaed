#include "train/optimizer.h"

#include "ops/adamw.h"
#include "ops/muon.h"
#include "ops/reductions.h"

namespace marrow {

Optimizer::Optimizer(ParameterStore& store, const PretrainConfig::Optimizer& config) : store_(&store), config_(config) {
  norm_ = at::zeros({1}, at::TensorOptions().device(store.options().device).dtype(at::kDouble));
}

void Optimizer::step(double learning_rate, int64_t step, const at::Tensor& loss) {
  norm_ = at::zeros_like(norm_);
  for (const FlatGroup& group : store_->groups()) add_sum_of_squares(group.grad, norm_);
  norm_.sqrt_();
  // As torch.nn.utils.clip_grad_norm_. A norm that is not finite must stop the update: infinity
  // would give a factor of 0, which stops it too.
  grad_scale_ = config_.clip_norm > 0 ? (norm_ + 1e-6).reciprocal_().mul_(config_.clip_norm).clamp_max_(1.0)
                                      : (norm_ * 0.0).add_(1.0);
  grad_scale_ = grad_scale_.add_(loss * 0.0).to(at::kFloat);

  for (FlatGroup& group : store_->groups()) {
    for (int64_t i = 0; i < group.muon_specs; ++i) update_muon(group, i, learning_rate);
    update_adamw(group, learning_rate, step);
  }
}

void Optimizer::update_muon(FlatGroup& group, size_t index, double learning_rate) {
  const ParameterSpec& spec = group.specs[index];
  MuonStep muon;
  muon.lr = learning_rate;
  muon.momentum = config_.muon_momentum;
  muon.weight_decay = spec.decay ? config_.weight_decay : 0.0;
  muon.zero_grad = true;
  // Neighbouring parts of one shape are one batch: all gates and ups of a layer's experts.
  int64_t offset = group.offsets[index];
  for (size_t part = 0; part < spec.parts.size();) {
    const HubTensor& first = spec.parts[part];
    int64_t count = 0;
    while (part < spec.parts.size() && spec.parts[part].shape == first.shape) ++part, ++count;
    const int64_t rows = first.shape[first.shape.size() - 2], columns = first.shape.back();
    const int64_t elements = count * first.elements();
    const auto matrices = [&](const at::Tensor& flat) {
      return flat.narrow(0, offset, elements).view({elements / (rows * columns), rows, columns});
    };
    const bool shared = group.working.is_same(group.master);
    muon_update(matrices(group.master), shared ? at::Tensor() : matrices(group.working), matrices(group.grad),
                matrices(group.exp_avg), grad_scale_, muon);
    offset += elements;
  }
}

void Optimizer::update_adamw(FlatGroup& group, double learning_rate, int64_t step) {
  AdamwStep adamw;
  adamw.lr = learning_rate;
  adamw.beta1 = config_.beta1;
  adamw.beta2 = config_.beta2;
  adamw.eps = config_.eps;
  adamw.step = step;
  adamw.zero_grad = true;
  for (size_t i = group.muon_specs; i < group.specs.size();) {
    const bool decay = group.specs[i].decay;
    const int64_t begin = group.offsets[i];
    while (i < group.specs.size() && group.specs[i].decay == decay) ++i;
    const int64_t n = group.offsets[i] - begin;
    adamw.weight_decay = decay ? config_.weight_decay : 0.0;
    const bool shared = group.working.is_same(group.master);
    adamw_update(group.master.narrow(0, begin, n), shared ? at::Tensor() : group.working.narrow(0, begin, n),
                 group.grad.narrow(0, begin, n), group.exp_avg.narrow(0, begin, n),
                 group.exp_avg_sq.narrow(0, begin - group.muon_elements, n), grad_scale_, adamw);
  }
}

}  // namespace marrow
