// Tokens to the ranks that hold their experts, and back: once per (token, rank), both ways.
#pragma once
#include <deque>

#include "ops/device.h"
#include "ops/rows.h"
#include "parallel/communicator.h"

namespace marrow {

// What an expert rank works on: rows from all ranks of the group, and which of its experts each needs.
struct DispatchedTokens {
  at::Tensor rows;          // [Q, H]
  at::Tensor weights;       // [Q, k] fp32, of the pairs below
  at::Tensor experts;       // [Q, k] int32, 0 … E/ep − 1; outside of that: not of this rank
  int64_t expert_rows = 0;  // pairs of this rank's experts; at most Q·k where only a bound is known
};

// The exchange of one layer and micro-batch. Its four moves come in pairs of start and finish, so that work goes on
// between them; every rank of the group makes the same moves in the same order, also where it has no row. In a group of
// two every token goes to both ranks: at a usual top-k nearly all would, and the host need know no size. In larger ones
// counts are exchanged first, by plan(), and the host waits for them in start_dispatch.
class ExpertDispatch {
 public:
  // `experts` E of the model; the group outlives this. Without `overlap` every start waits.
  ExpertDispatch(Communicator& group, int64_t experts, bool overlap = true)
      : group_(&group), experts_(experts), overlap_(overlap) {}

  // S2 forward. choices [T, k] int32 in [0, E), counts [G, E] int32 of them, tokens [T, H], weights [T, k] fp32.
  void plan(const at::Tensor& choices, const at::Tensor& counts);
  void start_dispatch(const at::Tensor& tokens, const at::Tensor& weights);
  DispatchedTokens finish_dispatch();
  // S4 forward. rows [Q, H], each the sum over this rank's experts → [P, H] with map().
  void start_combine(const at::Tensor& rows) { start(rows, true); }
  at::Tensor finish_combine() { return finish(); }
  const RowMap& map() const { return map_; }  // tokens [T] to sent rows [P]

  // S4 backward: gradient [P, H] → gradient of what the expert rank gave, [Q, H].
  void start_combine_backward(const at::Tensor& d_rows) { start(d_rows, false); }
  at::Tensor finish_combine_backward() { return finish(); }
  // S2 backward: gradients of DispatchedTokens' rows and weights (zero for experts of other ranks) → those of tokens,
  // with `d_tokens` (may be undefined) added, and of weights [T, k].
  void start_dispatch_backward(const at::Tensor& d_rows, const at::Tensor& d_weights);
  std::pair<at::Tensor, at::Tensor> finish_dispatch_backward(const at::Tensor& d_tokens);

  int64_t rows_sent() const;  // to other ranks, by one move; known once start_dispatch has returned

 private:
  void plan_whole();
  void plan_counted(const at::Tensor& counts);
  void await_counts();
  void start(const at::Tensor& rows, bool back);
  void keep(PendingTransfer transfer, const at::Tensor& arriving);
  at::Tensor finish();

  Communicator* group_;
  int64_t experts_;
  bool overlap_;
  at::Tensor choices_;                    // [T, k] int32
  RowMap map_;                            // tokens to sent rows
  std::optional<DeferredValues> counts_;  // on their way, [ranks, 2 · ranks]: of each rank, ends of rows and pairs
  std::vector<int64_t> sent_, received_;  // rows to and from each rank
  int64_t expert_rows_ = 0;               // of this rank
  std::deque<std::pair<PendingTransfer, at::Tensor>> moves_;
};

}  // namespace marrow
