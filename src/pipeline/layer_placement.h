// Which layers each chunk of a pipeline gets: by cost, since the head weighs as much as layers do.
#pragma once
#include "models/model_contract.h"
#include "pipeline/schedule_simulator.h"

namespace marrow {

// Forward times, in any one unit.
struct ModelCosts {
  std::vector<double> layers;
  double head = 0;
};

struct LayerRange {
  int64_t begin = 0, end = 0;
};

// Estimated seconds of one token's forward on an H200, a third of a step's: floating-point operations at the
// rates measured for Qwen3-30B-A3B's width, 500 TFLOP/s in layers, 600 in the head; and, once for each
// micro-batch of `tokens` tokens on a rank, the traffic of a layer's weights and weight gradients.
ModelCosts model_costs(const MoeModel& model, int64_t seq_len, int64_t tokens, int64_t ep);

// The layers of each chunk, by its place in the model: consecutive, none empty, all layers once. The slowest rank is as
// fast as can be, the head counted where the last chunk is; where an eighth of a mean layer decides, it is the fewest
// layers on a rank (memory), then the fastest slowest chunk. For at least as many layers as chunks (check_model_fits).
std::vector<LayerRange> place_layers(const PipelineShape& shape, const ModelCosts& costs);

// Of `tokens` a micro-batch: a backward takes two forwards, a fused pair the sum of its halves.
PipelineTimes estimated_times(const PipelineShape& shape, const std::vector<LayerRange>& placed,
                              const ModelCosts& costs, int64_t tokens);

}  // namespace marrow
