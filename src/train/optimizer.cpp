#include "train/optimizer.h"

#include <numbers>
#include <numeric>

#include "ops/optimizer.h"

namespace marrow {
namespace {

// One of the matrices that take turns in each of a tensor's stacked matrices (HubTensor::turns).
struct LogicalMatrix {
  int64_t begin, turn, period;  // elements [begin, begin + turn) of every `period`
  int64_t columns;
};

std::vector<LogicalMatrix> logical_matrices(const HubTensor& tensor) {
  const int64_t columns = tensor.shape.back(), whole = columns * tensor.shape[tensor.shape.size() - 2];
  if (tensor.turns.empty()) return {{0, whole, whole, columns}};
  const int64_t period = std::accumulate(tensor.turns.begin(), tensor.turns.end(), int64_t{0});
  std::vector<LogicalMatrix> matrices;
  int64_t begin = 0;
  for (const int64_t turn : tensor.turns) {
    const bool whole_rows = turn % columns == 0;
    matrices.push_back({begin, turn, period, whole_rows ? columns : columns / period * turn});
    begin += turn;
  }
  return matrices;
}

}  // namespace

double learning_rate(const PretrainConfig::Optimizer& o, int64_t step, int64_t steps) {
  if (step <= o.warmup_steps) return o.lr * static_cast<double>(step) / o.warmup_steps;
  switch (o.schedule) {
    case LearningRateSchedule::kConstant:
      return o.lr;
    case LearningRateSchedule::kWsd: {
      const int64_t left = steps - step;
      if (left >= o.decay_steps) return o.lr;
      return o.min_lr + (o.lr - o.min_lr) * std::max<int64_t>(left, 0) / o.decay_steps;
    }
    case LearningRateSchedule::kCosine: {
      const int64_t length = o.decay_steps > 0 ? o.decay_steps : steps - o.warmup_steps;
      const double done = static_cast<double>(step - o.warmup_steps) / std::max<int64_t>(length, 1);
      const double cosine = std::cos(std::numbers::pi * std::min(done, 1.0));
      return o.min_lr + (o.lr - o.min_lr) * 0.5 * (1.0 + cosine);
    }
  }
  return o.lr;
}

Optimizer::Optimizer(ParameterStore& store, const PretrainConfig::Optimizer& config, Communicator* world)
    : store_(&store), config_(config), world_(world) {
  norm_ = at::zeros({1}, at::TensorOptions().device(store.options().device).dtype(at::kDouble));
}

void Optimizer::step(double learning_rate, int64_t step, const at::Tensor& loss) {
  norm_ = at::zeros_like(norm_);
  const bool counts = store_->options().replicas.index == 0;  // each element once
  for (const FlatGroup& group : store_->groups()) {
    if (counts) add_sum_of_squares(group.own_grad, norm_);
  }
  if (world_ != nullptr) {
    const at::Tensor sums = at::cat({norm_, loss});
    world_->all_reduce(sums).wait();
    norm_ = sums.narrow(0, 0, 1);
    loss.copy_(sums.narrow(0, 1, 1));
  }
  norm_.sqrt_();
  // As torch.nn.utils.clip_grad_norm_. A norm that is not finite must stop the update: infinity
  // would give a factor of 0, which stops it too.
  grad_scale_ = config_.clip_norm > 0 ? (norm_ + 1e-6).reciprocal_().mul_(config_.clip_norm).clamp_max_(1.0)
                                      : (norm_ * 0.0).add_(1.0);
  grad_scale_ = grad_scale_.add_(loss * 0.0).to(at::kFloat);

  for (FlatGroup& group : store_->groups()) {
    update_muon(group, learning_rate);
    update_adamw(group, learning_rate, step);
    if (store_->options().by_layer) continue;
    // The update clears the own shard; the others hold partial sums.
    group.grad.narrow(0, 0, group.begin()).zero_();
    group.grad.narrow(0, group.end(), group.elements() - group.end()).zero_();
    store_->start_gather(group);  // beside the next groups' updates
  }
}

void Optimizer::update_muon(FlatGroup& group, double learning_rate) {
  const std::vector<FlatGroup::Piece> pieces = group.pieces();
  for (size_t i = 0; i < pieces.size() && std::cmp_less(pieces[i].spec, group.muon_specs);) {
    // Neighbours of one shape are one batch: all gates and ups of a layer's experts.
    const FlatGroup::Piece& first = pieces[i];
    const HubTensor& part = *first.part;
    int64_t elements = 0;
    for (; i < pieces.size() && pieces[i].spec == first.spec && pieces[i].part->shape == part.shape; ++i) {
      elements += pieces[i].last - pieces[i].first;
    }
    MuonStep muon;
    muon.lr = learning_rate;
    muon.momentum = config_.muon_momentum;
    muon.weight_decay = group.specs[first.spec].decay ? config_.weight_decay : 0.0;
    muon.zero_grad = true;
    const int64_t stacked = part.shape.back() * part.shape[part.shape.size() - 2];
    const int64_t batch = part.turns.empty() ? elements : stacked;  // what takes turns is copied: one at a time
    for (const LogicalMatrix& matrix : logical_matrices(part)) {
      for (int64_t at = first.at; at < first.at + elements; at += batch) {
        const auto view = [&](const at::Tensor& flat) {
          if (!flat.defined()) return flat;
          const at::Tensor turns = flat.narrow(0, at, batch).view({batch / stacked, -1, matrix.period});
          return turns.narrow(2, matrix.begin, matrix.turn);
        };
        const std::array own{view(group.master), view(group.rounded), view(group.own_grad), view(group.exp_avg)};
        std::array<at::Tensor, 4> dense;  // [matrices, rows, columns]: the memory itself, where nothing takes turns
        for (size_t t = 0; t < own.size(); ++t) {
          if (own[t].defined()) dense[t] = own[t].reshape({batch / stacked, -1, matrix.columns}).contiguous();
        }
        muon_update(dense[0], dense[1], dense[2], dense[3], grad_scale_, muon);
        for (size_t t = 0; t < own.size(); ++t) {
          if (own[t].defined() && !dense[t].is_alias_of(own[t])) own[t].copy_(dense[t].view(own[t].sizes()));
        }
      }
    }
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
  const int64_t without_square = std::max<int64_t>(0, group.muon_elements - group.begin());
  for (size_t i = group.muon_specs; i < group.specs.size();) {
    const bool decay = group.specs[i].decay;
    int64_t begin = group.offsets[i];
    while (i < group.specs.size() && group.specs[i].decay == decay) ++i;
    begin = std::max(begin, group.begin()) - group.begin();
    const int64_t n = std::min(group.offsets[i], group.end()) - group.begin() - begin;
    if (n <= 0) continue;
    adamw.weight_decay = decay ? config_.weight_decay : 0.0;
    const auto run = [&](const at::Tensor& flat) { return flat.defined() ? flat.narrow(0, begin, n) : flat; };
    adamw_update(run(group.master), run(group.rounded), run(group.own_grad), run(group.exp_avg),
                 group.exp_avg_sq.narrow(0, begin - without_square, n), grad_scale_, adamw);
  }
}

}  // namespace marrow
