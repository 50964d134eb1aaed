#include "ops/pch.h"

#include "pipeline/layer_placement.h"

#include <array>

namespace marrow {
namespace {

constexpr double kLayerRate = 500e12, kHeadRate = 600e12;  // operations per second
// Of a forward, a backward takes two of them: weights read three times, gradients added in fp32, at 4.2 TB/s.
constexpr double kElementSeconds = 18 / 4.2e12 / 3;

using Cost = std::array<int64_t, 3>;  // slowest rank, most layers of a rank, slowest chunk

Cost slower(const Cost& a, const Cost& b) { return {std::max(a[0], b[0]), std::max(a[1], b[1]), std::max(a[2], b[2])}; }

// Places from the outside in: when ranks 0 … r − 1 have theirs, [begin, end) is left in the middle.
class Placer {
 public:
  Placer(const PipelineShape& shape, const ModelCosts& costs)
      : shape_(shape), costs_(costs), layers_(std::ssize(costs.layers)), sums_{0} {
    for (const double cost : costs.layers) sums_.push_back(sums_.back() + cost);
    known_.resize(shape.pp * (layers_ + 1) * (layers_ + 1));
  }

  struct Choice {
    Cost cost{};
    int64_t front = 0, back = 0;  // layers that the rank takes of either end; 0: not known yet
  };
  const Choice& best(int64_t rank, int64_t begin, int64_t end) {
    Choice& best = known_[(rank * (layers_ + 1) + begin) * (layers_ + 1) + end];
    if (best.front > 0) return best;
    const bool is_last = rank + 1 == shape_.pp, two = shape_.slots() == 2;
    const int64_t room = end - begin - shape_.slots() * (shape_.pp - 1 - rank);  // the most that it can take
    best.cost[0] = std::numeric_limits<int64_t>::max();
    for (int64_t front = 1; front + two <= room; ++front) {
      for (int64_t back = two; front + back <= (two ? room : front); ++back) {
        if (is_last && front + back != room) continue;
        Cost cost = rank_cost(rank, {begin, begin + front}, {end - back, end});
        if (cost[0] > best.cost[0]) break;  // more layers only cost more
        if (!is_last) cost = slower(cost, this->best(rank + 1, begin + front, end - back).cost);
        if (cost < best.cost) best = {cost, front, back};
      }
    }
    return best;
  }

 private:
  Cost rank_cost(int64_t rank, const LayerRange& front, const LayerRange& back) const {
    const bool has_head = rank == shape_.rank_of(shape_.chunks() - 1), two = shape_.slots() == 2;
    const double first = sums_[front.end] - sums_[front.begin] + (has_head && !two ? costs_.head : 0);
    const double second = sums_[back.end] - sums_[back.begin] + (has_head && two ? costs_.head : 0);
    return {eighths(first + second), front.end - front.begin + back.end - back.begin, eighths(std::max(first, second))};
  }
  int64_t eighths(double cost) const {  // of a mean layer
    return std::llround(8 * cost * static_cast<double>(layers_) / sums_.back());
  }

  const PipelineShape& shape_;
  const ModelCosts& costs_;
  int64_t layers_;
  std::vector<double> sums_;  // of the layers before
  std::vector<Choice> known_;
};

}  // namespace

ModelCosts model_costs(const MoeModel& model, int64_t seq_len, int64_t tokens, int64_t ep) {
  const ModelShape& shape = model.shape();
  const double head = 2.0 * static_cast<double>(shape.hidden) * static_cast<double>(shape.vocab);
  ModelCosts costs{{}, head / kHeadRate};
  const double mixing = model.mixing_flops_per_token(seq_len) / static_cast<double>(shape.layers);
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    const std::vector<ParameterSpec> specs = model.layer_specs(layer);
    double elements = 0;  // of the weights that this rank holds
    for (const ParameterSpec& spec : specs) {
      const double ranks = spec.expert ? static_cast<double>(ep) : 1;
      for (const HubTensor& part : spec.parts) elements += static_cast<double>(part.elements()) / ranks;
    }
    costs.layers.push_back((product_flops_per_token(specs, shape) + mixing) / kLayerRate +
                           elements * kElementSeconds / static_cast<double>(tokens));
  }
  return costs;
}

std::vector<LayerRange> place_layers(const PipelineShape& shape, const ModelCosts& costs) {
  Placer placer(shape, costs);
  std::vector<LayerRange> ranges(shape.chunks());
  LayerRange left{0, std::ssize(costs.layers)};
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    const auto& choice = placer.best(rank, left.begin, left.end);
    if (choice.back > 0) ranges[shape.chunk_at(rank, 1)] = {left.end - choice.back, left.end};
    ranges[rank] = {left.begin, left.begin + choice.front};
    left = {left.begin + choice.front, left.end - choice.back};
  }
  return ranges;
}

PipelineTimes estimated_times(const PipelineShape& shape, const std::vector<LayerRange>& placed,
                              const ModelCosts& costs, int64_t tokens) {
  std::vector<double> forward;
  for (const LayerRange& range : placed) {
    double sum = range.end == std::ssize(costs.layers) ? costs.head : 0;
    for (int64_t layer = range.begin; layer < range.end; ++layer) sum += costs.layers[layer];
    forward.push_back(sum * static_cast<double>(tokens));
  }
  PipelineTimes times;
  for (int64_t chunk = 0; chunk < shape.chunks(); ++chunk) {
    const double f = forward[chunk], other = forward[shape.slots() == 2 ? shape.chunks() - 1 - chunk : chunk];
    times.chunks.push_back({f, 2 * f, f, f, f + 2 * other});
  }
  return times;
}

}  // namespace marrow
