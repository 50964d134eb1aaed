#include "ops/pch.h"

#include "pipeline/pipeline_schedule.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "pipeline/schedule_simulator.h"

namespace marrow {
namespace {

PipelineTimes equal_times(const PipelineShape& shape, const ChunkTimes& times, double latency = 0) {
  return {std::vector<ChunkTimes>(static_cast<size_t>(shape.chunks()), times), latency};
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.report().what;
  }
  return "";
}

template <typename Body>
void for_all_sizes(PipelineSchedule schedule, const Body& body) {
  for (int64_t pp = 1; pp <= 16; ++pp) {
    const int64_t least = schedule == PipelineSchedule::kDualPipeV && pp > 1 ? 2 * pp : 1;
    for (int64_t n = least; n <= 64; ++n) body(PipelineShape{schedule, pp}, n);
  }
}

// The simulator itself checks that every pass is done once, after its inputs, that no rank waits for
// ever, and that links keep their order.
TEST(PipelineSchedule, DualPipeVKeepsThePublishedBoundsOnEverySize) {
  const ChunkTimes kinds[] = {
      {.forward = 1, .backward = 2, .backward_input = 1, .weight_grad = 1, .pair = 3},
      {.forward = 1, .backward = 2, .backward_input = 1, .weight_grad = 1, .pair = 2.5},  // overlapped
      {.forward = 1, .backward = 1.75, .backward_input = 1, .weight_grad = 0.75, .pair = 2.75},
  };
  for (const ChunkTimes& t : kinds) {
    for_all_sizes(PipelineSchedule::kDualPipeV, [&](const PipelineShape& shape, int64_t n) {
      SCOPED_TRACE(fmt::format("pp {}, {} micro-batches, pair {}", shape.pp, n, t.pair));
      const auto line = simulate_pipeline(shape, n, all_pipeline_actions(shape, n), equal_times(shape, t));
      const double bubble = static_cast<double>(shape.pp - 1) * (t.pair + t.backward - 3 * t.weight_grad);
      for (int64_t rank = 0; rank < shape.pp; ++rank) {
        EXPECT_LE(line.ranks[rank].idle, bubble + 1e-9) << "rank " << rank;
        EXPECT_LE(line.ranks[rank].peak_live, 2 * shape.pp + 1) << "rank " << rank;
        EXPECT_LE(line.ranks[rank].peak_deferred, shape.pp) << "rank " << rank;
      }
    });
  }
}

TEST(PipelineSchedule, OneFOneBKeepsThePublishedBoundsOnEverySize) {
  const ChunkTimes t{.forward = 1, .backward = 2};
  for_all_sizes(PipelineSchedule::kOneFOneB, [&](const PipelineShape& shape, int64_t n) {
    SCOPED_TRACE(fmt::format("pp {}, {} micro-batches", shape.pp, n));
    const auto line = simulate_pipeline(shape, n, all_pipeline_actions(shape, n), equal_times(shape, t));
    for (int64_t rank = 0; rank < shape.pp; ++rank) {
      EXPECT_LE(line.ranks[rank].idle, static_cast<double>(shape.pp - 1) * (t.forward + t.backward));
      EXPECT_LE(line.ranks[rank].peak_live, std::min(n, shape.pp - rank));
      EXPECT_EQ(line.ranks[rank].peak_deferred, 0);
    }
  });
}

// Two ranks, five micro-batches, worked out by hand: Fsm forward of slot s and micro-batch m, B
// backward, I its input half, W the other half, + a fused pair.
TEST(PipelineSchedule, TwoRanksByHand) {
  const auto text = [](int64_t rank) {
    std::string out;
    for (const PipelineAction& a : pipeline_actions({PipelineSchedule::kDualPipeV, 2}, rank, 5)) {
      if (!out.empty()) out += " ";
      if (a.forward) out += fmt::format("F{}{}", a.forward.slot, a.forward.micro_batch);
      if (a.kind == ActionKind::kForwardBackward) out += "+";
      const char letter = a.kind == ActionKind::kBackwardInput ? 'I' : a.kind == ActionKind::kWeightGrad ? 'W' : 'B';
      if (a.backward) out += fmt::format("{}{}{}", letter, a.backward.slot, a.backward.micro_batch);
    }
    return out;
  };
  EXPECT_EQ(text(0), "F00 F01 F02 F10 I10 W10 F11 F03+B11 F12+B00 F04+B12 F13+B01 B13 F14+B02 B14 I03 W03 I04 W04");
  EXPECT_EQ(text(1), "F00 F10 F01 F11 F02 B10 F12+B00 F03+B11 F13+B01 F04+B12 F14+B02 B13 B03 I14 I04 W14 W04");
}

TEST(PipelineSchedule, OneRankPairsEachBackwardWithTheNextForward) {
  const PipelineShape shape{PipelineSchedule::kDualPipeV, 1};
  EXPECT_EQ(shape.chunks(), 1);
  const auto actions = pipeline_actions(shape, 0, 3);
  ASSERT_EQ(actions.size(), 4u);
  EXPECT_EQ(actions[1], (PipelineAction{ActionKind::kForwardBackward, {0, 1}, {0, 0}}));
  EXPECT_EQ(actions[2], (PipelineAction{ActionKind::kForwardBackward, {0, 2}, {0, 1}}));
  EXPECT_EQ(pipeline_actions(shape, 0, 1).size(), 2u);
}

TEST(PipelineSchedule, TooFewMicroBatchesAreRefusedWithTheFix) {
  for (const auto& [pp, n] : {std::pair{2, 3}, std::pair{4, 7}}) {
    try {
      pipeline_actions({PipelineSchedule::kDualPipeV, pp}, 0, n);
      ADD_FAILURE() << pp;
    } catch (const Error& error) {
      EXPECT_NE(error.report().what.find(fmt::format("{} micro-batches a step", n)), std::string::npos);
      EXPECT_NE(error.report().what.find(fmt::format("at least {}", 2 * pp)), std::string::npos);
      EXPECT_NE(error.report().fix.find("train.global_batch"), std::string::npos);
      EXPECT_EQ(error.report().code, ExitCode::kUsage);
    }
  }
  EXPECT_EQ(pipeline_actions({PipelineSchedule::kOneFOneB, 4}, 0, 1).size(), 2u);
}

// The lists that an executor reads its links by: what a rank sends is what its neighbour's passes
// need, each once; forwards of slot 0 and backwards of slot 1 go down, the others up.
TEST(PipelineSchedule, LinkMessagesAreWhatTheNeighbourNeeds) {
  for (const auto schedule : {PipelineSchedule::kDualPipeV, PipelineSchedule::kOneFOneB}) {
    for (const int64_t pp : {2, 3, 8}) {
      const PipelineShape shape{schedule, pp};
      const int64_t n = 2 * pp + 1;
      for (int64_t rank = 0; rank + 1 < pp; ++rank) {
        const auto down = link_messages(shape, n, rank, rank + 1), up = link_messages(shape, n, rank + 1, rank);
        EXPECT_EQ(std::ssize(down), shape.slots() * n);
        EXPECT_EQ(std::ssize(up), shape.slots() * n);
        for (const auto& m : down) EXPECT_EQ(m.forward, m.pass.slot == 0);
        for (const auto& m : up) EXPECT_EQ(m.forward, m.pass.slot == 1);
        for (const PipelineAction& action : pipeline_actions(shape, rank + 1, n)) {
          if (!action.forward || action.forward.slot != 0) continue;
          EXPECT_EQ(std::count(down.begin(), down.end(), PipelineMessage{true, action.forward}), 1);
        }
      }
      EXPECT_TRUE(link_messages(shape, n, 0, 0).empty());
    }
  }
}

TEST(PipelineSchedule, LatencyCostsTimeButNoDeadlock) {
  const PipelineShape shape{PipelineSchedule::kDualPipeV, 4};
  const auto actions = all_pipeline_actions(shape, 12);
  double before = 0;
  for (const double latency : {0.0, 0.1, 1.0, 10.0}) {
    const double makespan = simulate_pipeline(shape, 12, actions, equal_times(shape, {}, latency)).makespan;
    EXPECT_GT(makespan, before);
    before = makespan;
  }
}

TEST(ScheduleSimulator, CatchesWrongSchedules) {
  const PipelineShape shape{PipelineSchedule::kDualPipeV, 4};
  const RankActions right = all_pipeline_actions(shape, 9);
  const auto fault = [&](const RankActions& wrong) {
    return error_of([&] { simulate_pipeline(shape, 9, wrong, equal_times(shape, {})); });
  };
  EXPECT_EQ(fault(right), "");
  RankActions wrong = right;
  std::swap(wrong[3][0], wrong[3][1]);  // the turn's second half before its first
  EXPECT_NE(fault(wrong).find("comes before the forward of slot 0, micro-batch 0"), std::string::npos) << fault(wrong);
  wrong = right;
  wrong[1].erase(wrong[1].begin());  // a forward that never happens: its message is never sent
  EXPECT_NE(fault(wrong).find("deadlock: pipeline rank"), std::string::npos) << fault(wrong);
  wrong = right;
  wrong[2].pop_back();
  EXPECT_NE(fault(wrong).find("pipeline rank 2 does 17 weight gradients, not 18"), std::string::npos) << fault(wrong);
  wrong = right;
  wrong[0].push_back(wrong[0].back());
  EXPECT_NE(fault(wrong).find("done twice"), std::string::npos) << fault(wrong);
  wrong = right;
  std::reverse(wrong[1].begin(), wrong[1].begin() + 3);  // micro-batches 2, 1, 0
  EXPECT_NE(fault(wrong).find("off its link early"), std::string::npos) << fault(wrong);
  wrong = right;
  wrong[0][0].forward.micro_batch = 9;  // of 0 … 8
  EXPECT_NE(fault(wrong).find("of 9 micro-batches"), std::string::npos) << fault(wrong);
}

// Every exchange of two neighbouring actions of one rank is harmless, or found: never a simulation
// that ends with a pass before its input.
TEST(ScheduleSimulator, ExchangesOfNeighboursAreHarmlessOrFound) {
  const PipelineShape shape{PipelineSchedule::kDualPipeV, 3};
  const RankActions right = all_pipeline_actions(shape, 7);
  int64_t found = 0, harmless = 0;
  for (size_t rank = 0; rank < right.size(); ++rank) {
    for (size_t i = 0; i + 1 < right[rank].size(); ++i) {
      RankActions wrong = right;
      std::swap(wrong[rank][i], wrong[rank][i + 1]);
      PipelineTimeline line;
      if (!error_of([&] { line = simulate_pipeline(shape, 7, wrong, equal_times(shape, {})); }).empty()) {
        ++found;
        continue;
      }
      ++harmless;
      std::map<std::pair<int64_t, int64_t>, const TimedAction*> forwards;
      for (int64_t r = 0; r < 3; ++r) {
        for (const TimedAction& t : line.ranks[r].actions) {
          if (t.action.forward) forwards[{shape.chunk_at(r, t.action.forward.slot), t.action.forward.micro_batch}] = &t;
        }
      }
      ASSERT_EQ(forwards.size(), 42u);
      for (const auto& [key, timed] : forwards) {
        if (key.first == 0) continue;
        EXPECT_GE(timed->start, forwards.at({key.first - 1, key.second})->end);
      }
    }
  }
  EXPECT_GT(found, 10);
  EXPECT_GT(harmless, 0);
}

}  // namespace
}  // namespace marrow
