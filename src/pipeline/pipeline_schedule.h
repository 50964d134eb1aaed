// Pipeline schedules as pure functions: what each rank does, in which order, and what it sends.
//
// The model is cut into consecutive chunks. 1F1B: rank r has one, chunk r. DualPipeV: rank r has two, r and
// 2·pp − 1 − r, so that a micro-batch goes down the ranks and up again (a V, embedding and head both on rank 0);
// forwards of one direction run together with backwards of the other. A rank calls its chunks slot 0 and slot 1.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace marrow {

enum class PipelineSchedule { kDualPipeV, kOneFOneB };

struct PipelineShape {
  PipelineSchedule schedule = PipelineSchedule::kDualPipeV;
  int64_t pp = 1;  // ranks

  // Chunks of one rank: 2 for DualPipeV, except 1 at pp = 1, where the V would bring nothing.
  int64_t slots() const { return schedule == PipelineSchedule::kDualPipeV && pp > 1 ? 2 : 1; }
  int64_t chunks() const { return slots() * pp; }
  // The place of a rank's chunk in the model, 0 … chunks() − 1, and the reverse.
  int64_t chunk_at(int64_t rank, int64_t slot) const { return slot == 0 ? rank : 2 * pp - 1 - rank; }
  int64_t rank_of(int64_t chunk) const { return chunk < pp ? chunk : 2 * pp - 1 - chunk; }
};

enum class ActionKind {
  kForward,
  kBackward,         // with its weight gradients
  kBackwardInput,    // weight gradients are deferred
  kWeightGrad,       // those of an earlier kBackwardInput
  kForwardBackward,  // a fused pair, independent of each other; the backward with its weight gradients
};

// One micro-batch through one chunk. slot < 0: none.
struct PipelinePass {
  int64_t slot = -1, micro_batch = -1;
  explicit operator bool() const { return slot >= 0; }
  bool operator==(const PipelinePass&) const = default;
};

// The input of a pass is received just before it and its output sent just after it, the forward's
// before the backward's in a pair, where source_rank and target_rank name another rank.
struct PipelineAction {
  ActionKind kind = ActionKind::kForward;
  PipelinePass forward;   // of kForward and kForwardBackward
  PipelinePass backward;  // of all others and kForwardBackward
  bool operator==(const PipelineAction&) const = default;
};
const char* action_name(ActionKind kind);           // "forward", "backward", "backward_input", …
std::string to_text(const PipelineAction& action);  // "forward(slot 0, micro-batch 3)"

// The actions of one rank in order. DualPipeV with pp > 1 needs micro_batches ≥ 2·pp (else Error,
// kUsage). With F, B, W and FB the times of a chunk's forward, whole backward, weight gradients
// (W ≤ B/2) and of a pair, each rank idles for (pp − 1)(FB + B − 3W) and keeps the activations of at
// most 2·pp + 1 forwards. Source: DeepSeek-V3, arXiv 2412.19437, table 2, whose PP counts chunks
// (2·pp), and https://github.com/deepseek-ai/DualPipe. At pp = 1 each backward is paired with the next
// micro-batch's forward. 1F1B takes any micro_batches, idles for (pp − 1)(F + B), keeps pp − rank.
std::vector<PipelineAction> pipeline_actions(const PipelineShape& shape, int64_t rank, int64_t micro_batches);

// Where the input of a pass comes from and where its output goes: a rank (this one at the turn of
// the V), or −1: the tokens, the loss, nowhere.
int64_t source_rank(const PipelineShape& shape, int64_t rank, bool forward, int64_t slot);
int64_t target_rank(const PipelineShape& shape, int64_t rank, bool forward, int64_t slot);

// A tensor [T, H] on its way: the hidden states that `pass` reads (forward) or the gradient of
// those it gave (backward). The slot is the same at both ends.
struct PipelineMessage {
  bool forward = true;
  PipelinePass pass;
  bool operator==(const PipelineMessage&) const = default;
};

// Every message from rank `from` to its neighbour `to`, in the order sent. The receiver takes them off the link in this
// very order, so the two ends cannot differ; it may have to take a message before the one it needs, and then keeps it:
// at most kEarlyMessages at a time (proven by simulate_pipeline).
std::vector<PipelineMessage> link_messages(const PipelineShape& shape, int64_t micro_batches, int64_t from, int64_t to);
constexpr int64_t kEarlyMessages = 1;

}  // namespace marrow
