#include "pipeline/pipeline_schedule.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace marrow {
namespace {

// Appends actions; every kind of pass takes its micro-batches in order.
class ActionList {
 public:
  void forward(int64_t slot) { actions_.push_back({ActionKind::kForward, next_forward(slot), {}}); }
  void backward(int64_t slot) { actions_.push_back({ActionKind::kBackward, {}, next_backward(slot)}); }
  void backward_input(int64_t slot) {
    deferred_.push_back(next_backward(slot));
    actions_.push_back({ActionKind::kBackwardInput, {}, deferred_.back()});
  }
  void weight_grad() {  // the oldest that is deferred
    actions_.push_back({ActionKind::kWeightGrad, {}, deferred_.at(weight_grads_++)});
  }
  void pair(int64_t forward_slot, int64_t backward_slot) {
    actions_.push_back({ActionKind::kForwardBackward, next_forward(forward_slot), next_backward(backward_slot)});
  }
  std::vector<PipelineAction> take() { return std::move(actions_); }

 private:
  PipelinePass next_forward(int64_t slot) { return {slot, forwards_[slot]++}; }
  PipelinePass next_backward(int64_t slot) { return {slot, backwards_[slot]++}; }
  std::vector<PipelineAction> actions_;
  std::vector<PipelinePass> deferred_;
  size_t weight_grads_ = 0;
  int64_t forwards_[2] = {0, 0}, backwards_[2] = {0, 0};
};

template <typename Body>
void repeat(int64_t times, const Body& body) {
  for (int64_t i = 0; i < times; ++i) body();
}

std::vector<PipelineAction> one_f_one_b(int64_t pp, int64_t rank, int64_t n) {
  ActionList list;
  const int64_t ahead = std::min(pp - 1 - rank, n);  // micro-batches that fill the later ranks
  repeat(ahead, [&] { list.forward(0); });
  repeat(n - ahead, [&] { list.forward(0), list.backward(0); });
  repeat(ahead, [&] { list.backward(0); });
  return list.take();
}

std::vector<PipelineAction> pairs_on_one_rank(int64_t n) {
  ActionList list;
  list.forward(0);
  repeat(n - 1, [&] { list.pair(0, 0); });
  list.backward(0);
  return list.take();
}

std::vector<PipelineAction> dual_pipe_v(int64_t pp, int64_t rank, int64_t n) {
  ActionList list;
  const int64_t deeper = pp - 1 - rank;  // ranks from here to the turn of the V
  // Warm-up: fill the ranks below, then alternate with the micro-batches that come back up.
  repeat(2 * deeper, [&] { list.forward(0); });
  repeat(rank + 1, [&] { list.forward(0), list.forward(1); });
  // The first backwards hand their input gradient on before their weights': the ranks below wait.
  repeat(deeper, [&] { list.backward_input(1), list.weight_grad(), list.forward(1); });
  // Main phase: fused pairs. The turn's first is not fused: its forward reaches the rank above without a backward.
  const int64_t main = n - 2 * pp + rank + 1;  // ≥ 1, since n ≥ 2 pp
  for (int64_t i = 0; i < main; ++i) {
    if (i == 0 && deeper == 0) {
      list.forward(0), list.backward(1);
    } else {
      list.pair(0, 1);
    }
    list.pair(1, 0);
  }
  // Slot 0 has no forward left.
  repeat(deeper, [&] { list.backward(1), list.pair(1, 0); });
  // No forward left. From half of these backwards on weight gradients are deferred, to be done where
  // the rank would wait for its last input gradients.
  for (int64_t i = 0; i <= 2 * rank + 1; ++i) {
    const int64_t slot = 1 - i % 2;
    i > rank ? list.backward_input(slot) : list.backward(slot);
  }
  repeat(deeper, [&] { list.weight_grad(), list.backward_input(0); });
  repeat(rank + 1, [&] { list.weight_grad(); });
  return list.take();
}

}  // namespace

const char* action_name(ActionKind kind) {
  constexpr const char* kNames[] = {"forward", "backward", "backward_input", "weight_grad", "pair"};
  return kNames[static_cast<size_t>(kind)];
}

std::string to_text(const PipelineAction& action) {
  const auto pass = [](const char* name, const PipelinePass& p) {
    return fmt::format("{}(slot {}, micro-batch {})", name, p.slot, p.micro_batch);
  };
  if (action.kind == ActionKind::kForwardBackward) {
    return pass("forward", action.forward) + " + " + pass("backward", action.backward);
  }
  return pass(action_name(action.kind), action.forward ? action.forward : action.backward);
}

std::vector<PipelineAction> pipeline_actions(const PipelineShape& shape, int64_t rank, int64_t micro_batches) {
  MARROW_CHECK(rank >= 0 && rank < shape.pp, ExitCode::kUsage, Fix("set mesh.pp to the number of pipeline ranks"),
               "pipeline rank {} of mesh.pp = {}", rank, shape.pp);
  const bool is_v = shape.slots() == 2;
  const int64_t needed = is_v ? 2 * shape.pp : 1;
  MARROW_CHECK(micro_batches >= needed, ExitCode::kUsage,
               Fix(fmt::format("raise train.global_batch to at least {} x train.micro_batch x mesh.dp x mesh.ep{}",
                               needed, is_v ? ", lower mesh.pp, or set mesh.schedule = \"1f1b\"" : "")),
               "{} micro-batches a step; the schedule of mesh.pp = {} needs at least {}", micro_batches, shape.pp,
               needed);
  if (shape.schedule == PipelineSchedule::kOneFOneB) return one_f_one_b(shape.pp, rank, micro_batches);
  return is_v ? dual_pipe_v(shape.pp, rank, micro_batches) : pairs_on_one_rank(micro_batches);
}

// A gradient comes from where the hidden states went.
int64_t source_rank(const PipelineShape& shape, int64_t rank, bool forward, int64_t slot) {
  return target_rank(shape, rank, !forward, slot);
}

int64_t target_rank(const PipelineShape& shape, int64_t rank, bool forward, int64_t slot) {
  const int64_t chunk = shape.chunk_at(rank, slot) + (forward ? 1 : -1);
  return chunk < 0 || chunk >= shape.chunks() ? -1 : shape.rank_of(chunk);
}

std::vector<PipelineMessage> link_messages(const PipelineShape& shape, int64_t micro_batches, int64_t from,
                                           int64_t to) {
  std::vector<PipelineMessage> messages;
  const auto add = [&](bool forward, const PipelinePass& pass) {
    if (pass && from != to && target_rank(shape, from, forward, pass.slot) == to) messages.push_back({forward, pass});
  };
  for (const PipelineAction& action : pipeline_actions(shape, from, micro_batches)) {
    add(true, action.forward);
    if (action.kind != ActionKind::kWeightGrad) add(false, action.backward);
  }
  return messages;
}

}  // namespace marrow
