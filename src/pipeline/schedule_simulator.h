// Runs the schedules of all pipeline ranks event by event: proves that they fit together, says how long they take.
#pragma once
#include <vector>

#include "pipeline/pipeline_schedule.h"

namespace marrow {

// Times of one chunk, in any unit.
struct ChunkTimes {
  double forward = 1, backward = 2, backward_input = 1, weight_grad = 1;
  double pair = 3;  // this chunk's forward fused with a backward of the rank's other chunk
};

struct PipelineTimes {
  std::vector<ChunkTimes> chunks;  // by place in the model
  double latency = 0;              // of a message, after the action that sends it has ended
};

struct TimedAction {
  PipelineAction action;
  double start = 0, end = 0;
};

struct RankTimeline {
  std::vector<TimedAction> actions;
  double idle = 0;            // the bubble: makespan less the time in actions
  int64_t peak_live = 0;      // forwards whose backward has not ended
  int64_t peak_deferred = 0;  // backwards whose weight gradients are still to do
};

struct PipelineTimeline {
  double makespan = 0;
  std::vector<RankTimeline> ranks;
  double bubble_share() const;  // idle time of all ranks over ranks · makespan
};
// Of the actions of each rank, in order. Times are from the start of the first on.
PipelineTimeline sum_up(const std::vector<std::vector<TimedAction>>& actions);

using RankActions = std::vector<std::vector<PipelineAction>>;  // by rank
RankActions all_pipeline_actions(const PipelineShape& shape, int64_t micro_batches);

// Actions of a rank run one after the other, each as soon as its input is there. Messages of a link
// are taken in the order sent. Throws Error naming rank and action: an input that the rank itself
// has not made yet, a pass done twice or never, a message that nobody sends (a deadlock) or takes,
// more than kEarlyMessages on a link that the receiver had to take early.
PipelineTimeline simulate_pipeline(const PipelineShape& shape, int64_t micro_batches, const RankActions& actions,
                                   const PipelineTimes& times);

}  // namespace marrow
