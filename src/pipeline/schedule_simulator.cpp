#include "pipeline/schedule_simulator.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/error.h"

namespace marrow {
namespace {

const Fix kScheduleFix(
    "correct pipeline_actions (src/pipeline/pipeline_schedule.cpp): the order of this rank's actions");

enum Done { kForwards, kBackwards, kWeightGrads };
constexpr const char* kDoneNames[] = {"forward", "backward", "weight gradient"};
using PassKey = std::tuple<Done, int64_t, int64_t>;  // slot, micro-batch

double action_time(const PipelineTimes& times, const PipelineShape& shape, int64_t rank, const PipelineAction& action) {
  constexpr double ChunkTimes::*kTimes[] = {&ChunkTimes::forward, &ChunkTimes::backward, &ChunkTimes::backward_input,
                                            &ChunkTimes::weight_grad, &ChunkTimes::pair};  // by ActionKind
  const PipelinePass& pass = action.forward ? action.forward : action.backward;
  return times.chunks.at(shape.chunk_at(rank, pass.slot)).*kTimes[static_cast<size_t>(action.kind)];
}

// Messages of a link: sent, taken off it, and given to an action.
struct Link {
  int64_t sent = 0, taken = 0, used = 0;
};
struct Arrival {
  int64_t number = 0;  // on its link
  double time = 0;
};
using MessageKey = std::tuple<int64_t, bool, int64_t, int64_t>;  // receiver, forward, slot, micro-batch

class Simulation {
 public:
  Simulation(const PipelineShape& shape, int64_t micro_batches, const RankActions& actions, const PipelineTimes& times)
      : shape_(shape),
        micro_batches_(micro_batches),
        actions_(actions),
        times_(times),
        done_(shape.pp),
        timed_(shape.pp) {}

  PipelineTimeline run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (int64_t rank = 0; rank < shape_.pp; ++rank) {
        while (run_next(rank)) progress = true;
      }
    }
    check_complete();
    return sum_up(timed_);
  }

 private:
  // False where the rank is at its end or waits for a message.
  bool run_next(int64_t rank) {
    std::vector<TimedAction>& timed = timed_[rank];
    if (timed.size() == actions_[rank].size()) return false;
    const PipelineAction& action = actions_[rank][timed.size()];
    double start = timed.empty() ? 0 : timed.back().end;
    if (action.kind == ActionKind::kWeightGrad) {
      require(rank, action, {kBackwards, action.backward.slot, action.backward.micro_batch});
    } else {
      if (!input_ready(rank, action, true, action.forward)) return false;
      if (!input_ready(rank, action, false, action.backward)) return false;
      start = std::max({start, take(rank, action, true, action.forward), take(rank, action, false, action.backward)});
    }
    const double end = start + action_time(times_, shape_, rank, action);
    timed.push_back({action, start, end});
    finish(rank, action, end);
    return true;
  }

  bool input_ready(int64_t rank, const PipelineAction& action, bool forward, const PipelinePass& pass) {
    if (!pass) return true;
    const int64_t m = pass.micro_batch, source = source_rank(shape_, rank, forward, pass.slot);
    if (!forward) require(rank, action, {kForwards, pass.slot, m});
    if (source == rank) require(rank, action, {forward ? kForwards : kBackwards, 1 - pass.slot, m});  // the V's turn
    return source < 0 || source == rank || arrivals_.contains({rank, forward, pass.slot, m});
  }

  void require(int64_t rank, const PipelineAction& action, const PassKey& key) const {
    const auto [done, slot, micro_batch] = key;
    MARROW_CHECK(done_[rank].contains(key), ExitCode::kDeviceFault, kScheduleFix,
                 "pipeline rank {}: {} comes before the {} of slot {}, micro-batch {}", rank, to_text(action),
                 kDoneNames[done], slot, micro_batch);
  }

  // Takes the link's messages up to the pass's, if it needs one; when that arrived.
  double take(int64_t rank, const PipelineAction& action, bool forward, const PipelinePass& pass) {
    const int64_t source = pass ? source_rank(shape_, rank, forward, pass.slot) : rank;
    if (source < 0 || source == rank) return 0;
    const Arrival arrival = arrivals_.extract({rank, forward, pass.slot, pass.micro_batch}).mapped();
    Link& link = links_[{source, rank}];
    link.taken = std::max(link.taken, arrival.number + 1);
    const int64_t early = link.taken - ++link.used;
    MARROW_CHECK(early <= kEarlyMessages, ExitCode::kDeviceFault, kScheduleFix,
                 "pipeline rank {}: {} takes {} other messages off its link early; the most is {}", rank,
                 to_text(action), early, kEarlyMessages);
    return arrival.time;
  }

  void finish(int64_t rank, const PipelineAction& action, double end) {
    if (action.forward) mark(rank, action, kForwards, action.forward), send(rank, true, action.forward, end);
    if (!action.backward) return;
    if (action.kind != ActionKind::kWeightGrad) {
      mark(rank, action, kBackwards, action.backward), send(rank, false, action.backward, end);
    }
    if (action.kind != ActionKind::kBackwardInput) mark(rank, action, kWeightGrads, action.backward);
  }

  void mark(int64_t rank, const PipelineAction& action, Done done, const PipelinePass& pass) {
    MARROW_CHECK(done_[rank].emplace(done, pass.slot, pass.micro_batch).second && pass.micro_batch < micro_batches_,
                 ExitCode::kDeviceFault, kScheduleFix, "pipeline rank {}: {} is done twice, or of {} micro-batches",
                 rank, to_text(action), micro_batches_);
  }

  void send(int64_t rank, bool forward, const PipelinePass& pass, double end) {
    const int64_t target = target_rank(shape_, rank, forward, pass.slot);
    if (target < 0 || target == rank) return;
    arrivals_[{target, forward, pass.slot, pass.micro_batch}] = {links_[{rank, target}].sent++, end + times_.latency};
  }

  void check_complete() {
    for (int64_t rank = 0; rank < shape_.pp; ++rank) {
      const size_t at = timed_[rank].size();
      MARROW_CHECK(at == actions_[rank].size(), ExitCode::kDeviceFault, kScheduleFix,
                   "deadlock: pipeline rank {} waits for the input of {}, action {} of {}", rank,
                   to_text(actions_[rank][at]), at, actions_[rank].size());
      for (const Done done : {kForwards, kBackwards, kWeightGrads}) {
        const int64_t count =
            std::ranges::count(done_[rank], done, [](const PassKey& key) { return std::get<0>(key); });
        const int64_t wanted = shape_.slots() * micro_batches_;
        MARROW_CHECK(count == wanted, ExitCode::kDeviceFault, kScheduleFix, "pipeline rank {} does {} {}s, not {}",
                     rank, count, kDoneNames[done], wanted);
      }
    }
    for (const auto& [ranks, link] : links_) {
      MARROW_CHECK(link.used == link.sent, ExitCode::kDeviceFault, kScheduleFix,
                   "pipeline rank {} sends {} messages to rank {}, which takes {}", ranks.first, link.sent,
                   ranks.second, link.used);
    }
  }

  const PipelineShape& shape_;
  const int64_t micro_batches_;
  const RankActions& actions_;
  const PipelineTimes& times_;
  std::vector<std::set<PassKey>> done_;                // by rank
  std::vector<std::vector<TimedAction>> timed_;        // by rank
  std::map<std::pair<int64_t, int64_t>, Link> links_;  // from, to
  std::map<MessageKey, Arrival> arrivals_;             // not taken yet
};

}  // namespace

double PipelineTimeline::bubble_share() const {
  double idle = 0;
  for (const RankTimeline& rank : ranks) idle += rank.idle;
  return makespan > 0 ? idle / (makespan * static_cast<double>(ranks.size())) : 0;
}

PipelineTimeline sum_up(const std::vector<std::vector<TimedAction>>& actions) {
  PipelineTimeline timeline;
  double first = std::numeric_limits<double>::infinity(), last = 0;
  for (const auto& rank : actions) {
    first = std::min(first, rank.front().start);
    last = std::max(last, rank.back().end);
  }
  timeline.makespan = last - first;
  for (const auto& rank : actions) {
    RankTimeline& line = timeline.ranks.emplace_back();
    line.idle = timeline.makespan;
    int64_t live = 0, deferred = 0;
    for (const auto& [action, start, end] : rank) {
      line.actions.push_back({action, start - first, end - first});
      line.idle -= end - start;
      if (action.forward) line.peak_live = std::max(line.peak_live, ++live);
      if (action.backward && action.kind != ActionKind::kWeightGrad) --live;
      if (action.kind == ActionKind::kBackwardInput) line.peak_deferred = std::max(line.peak_deferred, ++deferred);
      if (action.kind == ActionKind::kWeightGrad) --deferred;
    }
  }
  return timeline;
}

RankActions all_pipeline_actions(const PipelineShape& shape, int64_t micro_batches) {
  RankActions all;
  for (int64_t rank = 0; rank < shape.pp; ++rank) all.push_back(pipeline_actions(shape, rank, micro_batches));
  return all;
}

PipelineTimeline simulate_pipeline(const PipelineShape& shape, int64_t micro_batches, const RankActions& actions,
                                   const PipelineTimes& times) {
  return Simulation(shape, micro_batches, actions, times).run();
}

}  // namespace marrow
