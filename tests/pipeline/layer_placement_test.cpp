#include "ops/pch.h"

#include "pipeline/layer_placement.h"

#include <gtest/gtest.h>

namespace marrow {
namespace {

constexpr auto kV = PipelineSchedule::kDualPipeV;
constexpr auto k1F1B = PipelineSchedule::kOneFOneB;

ModelCosts equal_layers(int64_t layers, double head) { return {std::vector<double>(layers, 1.0), head}; }

std::vector<int64_t> sizes(const std::vector<LayerRange>& ranges) {
  std::vector<int64_t> out;
  for (const LayerRange& range : ranges) out.push_back(range.end - range.begin);
  return out;
}

// The cost of the slowest rank.
double slowest_rank(const PipelineShape& shape, const ModelCosts& costs, const std::vector<LayerRange>& ranges) {
  std::vector<double> ranks(shape.pp, 0.0);
  ranks[shape.rank_of(shape.chunks() - 1)] += costs.head;
  for (int64_t chunk = 0; chunk < shape.chunks(); ++chunk) {
    for (int64_t l = ranges[chunk].begin; l < ranges[chunk].end; ++l) ranks[shape.rank_of(chunk)] += costs.layers[l];
  }
  return *std::max_element(ranks.begin(), ranks.end());
}

void expect_every_layer_once(const PipelineShape& shape, const std::vector<LayerRange>& ranges, int64_t layers) {
  ASSERT_EQ(std::ssize(ranges), shape.chunks());
  int64_t next = 0;
  for (const LayerRange& range : ranges) {
    EXPECT_EQ(range.begin, next);
    EXPECT_GT(range.end, range.begin);
    next = range.end;
  }
  EXPECT_EQ(next, layers);
}

TEST(LayerPlacement, EveryLayerOnceOnAnyNumberOfChunks) {
  for (const auto schedule : {kV, k1F1B}) {
    for (const int64_t pp : {1, 2, 3, 4, 7, 16}) {
      const PipelineShape shape{schedule, pp};
      for (int64_t layers = shape.chunks(); layers <= 100; layers += layers < 40 || pp < 4 ? 1 : 7) {
        SCOPED_TRACE(fmt::format("{} layers, pp {}, {} chunks", layers, pp, shape.chunks()));
        const ModelCosts costs = equal_layers(layers, 3);
        const auto ranges = place_layers(shape, costs);
        expect_every_layer_once(shape, ranges, layers);
        // No rank is slower than its fair share rounded up to layers, or than the head forces.
        const double share = std::ceil((static_cast<double>(layers) + 3) / static_cast<double>(pp));
        const double forced = 3.0 + static_cast<double>(shape.slots());
        EXPECT_LE(slowest_rank(shape, costs, ranges), std::max(share, forced) + 0.125);
      }
    }
  }
}

TEST(LayerPlacement, LayersThatDoNotDivide) {
  EXPECT_EQ(sizes(place_layers({kV, 2}, equal_layers(30, 0))), (std::vector<int64_t>{7, 7, 8, 8}));
  for (const int64_t pp : {2, 4}) {
    const PipelineShape shape{kV, pp};
    const auto ranges = place_layers(shape, equal_layers(27, 0));
    expect_every_layer_once(shape, ranges, 27);
    EXPECT_EQ(slowest_rank(shape, equal_layers(27, 0), ranges), pp == 2 ? 14 : 7);
  }
}

TEST(LayerPlacement, TheHeadCounts) {
  // Eight layers and a head of three: 3 + head against 5.
  const PipelineShape v{kV, 2};
  for (const double head : {2.5, 3.0, 3.06}) {
    const auto ranges = place_layers(v, equal_layers(8, head));
    EXPECT_EQ(ranges[0].end - ranges[0].begin + ranges[3].end - ranges[3].begin, 3) << head;
    EXPECT_EQ(ranges[3].end - ranges[3].begin, 1) << "the chunk of the head has the fewer layers";
  }
  EXPECT_EQ(sizes(place_layers({k1F1B, 2}, equal_layers(8, 3))), (std::vector<int64_t>{5, 3}));
  const auto heavy =
      sizes(place_layers({k1F1B, 4}, equal_layers(8, 100)));  // the other ranks share fairly all the same
  EXPECT_EQ(heavy.back(), 1);
  EXPECT_EQ(*std::max_element(heavy.begin(), heavy.end()), 3);
}

// Against every placement there is, for layers of different costs.
TEST(LayerPlacement, NoPlacementIsFaster) {
  uint64_t state = 1;
  const auto random = [&](uint64_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33u) % n;
  };
  for (int trial = 0; trial < 60; ++trial) {
    const PipelineShape shape{trial % 2 == 0 ? kV : k1F1B, 1 + static_cast<int64_t>(random(3))};
    const int64_t layers = shape.chunks() + static_cast<int64_t>(random(5));
    ModelCosts costs{{}, static_cast<double>(random(12))};
    for (int64_t l = 0; l < layers; ++l) costs.layers.push_back(static_cast<double>(1 + random(8)));
    double best = std::numeric_limits<double>::infinity(), sum = 0;
    for (const double cost : costs.layers) sum += cost;
    // A bit after each layer but the last: does a chunk end there?
    for (uint64_t cuts = 0; cuts < (uint64_t{1} << static_cast<uint64_t>(layers - 1)); ++cuts) {
      if (__builtin_popcountll(cuts) + 1 != shape.chunks()) continue;
      std::vector<LayerRange> ranges = {{0, layers}};
      for (int64_t l = 0; l + 1 < layers; ++l) {
        if ((cuts >> static_cast<uint64_t>(l) & 1u) == 0) continue;
        ranges.back().end = l + 1;
        ranges.push_back({l + 1, layers});
      }
      best = std::min(best, slowest_rank(shape, costs, ranges));
    }
    const auto placed = place_layers(shape, costs);
    expect_every_layer_once(shape, placed, layers);
    EXPECT_LE(slowest_rank(shape, costs, placed), best + sum / static_cast<double>(layers) / 8 + 1e-9) << trial;
  }
}

TEST(LayerPlacement, CostsAreThoseOfTheModel) {
  const auto model = open_model(Json::read_file(MARROW_SOURCE_DIR "/configs/models/qwen3-30b-a3b.json"));
  const ModelCosts costs = model_costs(*model, 4096, 16384, 1);
  ASSERT_EQ(costs.layers.size(), 48u);
  const ModelCosts products = model_costs(*model, 4096, int64_t{1} << 50, 1);  // no traffic of weights
  double sum = 600e12 * products.head;
  for (const double layer : products.layers) sum += 500e12 * layer;
  EXPECT_NEAR(sum / model->forward_flops_per_token(4096), 1.0, 1e-6);
  EXPECT_NEAR(costs.head / costs.layers[0], 50.3 / 16.4, 0.15);  // as measured
  const ModelCosts small = model_costs(*model, 4096, 4096, 1);
  EXPECT_NEAR(small.head / small.layers[0], 12.9 / 6.8, 0.2);  // likewise, at micro_batch 1
  const PipelineShape shape{kV, 2};
  const auto ranges = place_layers(shape, costs);
  const PipelineTimes times = estimated_times(shape, ranges, costs, 16384);
  EXPECT_NEAR(times.chunks[0].forward, static_cast<double>(ranges[0].end) * costs.layers[0] * 16384, 1e-12);
  EXPECT_NEAR(times.chunks[3].pair, times.chunks[3].forward + times.chunks[0].backward, 1e-12);
}

}  // namespace
}  // namespace marrow
