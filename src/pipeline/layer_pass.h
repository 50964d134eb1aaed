// One decoder layer on one micro-batch: its five stages forward, and backward.
#pragma once
#include "models/model_contract.h"
#include "ops/rows.h"
#include "parallel/expert_dispatch.h"
#include "pipeline/router_balance.h"
#include "pipeline/stage_graph.h"

namespace marrow {

// S1 attention, router → S2 dispatch → S3 experts → S4 combine → S5 sum, residual; of a dense layer S1 and S5 alone.
// S1, S3 and S5 are StageGraphs, kept from forward to backward; under no-grad nothing is kept. S2 and S4 move tokens
// between ranks, and do nothing where a rank holds all experts. A forward is four steps and a backward three, cut
// where a move is under way, so that a step of another pass can run meanwhile.
class LayerPass {
 public:
  struct Options {
    Communicator* experts = nullptr;  // ranks that share the experts; null: this rank has all
    BalanceTracker* tracker = nullptr;
    bool recompute = false;        // keep only the input, and run the forward again before the backward
    bool recompute_cheap = false;  // keep all but what the stages add to a RecomputeList
    bool overlap = true;           // false: each move is waited for at once
  };
  // The layer, and what the options point to, outlive the pass. index: among the MoE layers; negative: a dense layer.
  LayerPass(const DecoderLayer& layer, int64_t index, const Options& options)
      : layer_(&layer), index_(index), options_(options) {}

  // hidden [T, H] → [T, H].
  void start_forward(const at::Tensor& hidden, const LayerContext& shared);  // S1; where tokens go is found out
  int64_t start_dispatch();     // S2 starts; the host may wait for sizes. Returns the rows that go to other ranks
  void run_experts();           // S2 ends; S3; S4 starts
  at::Tensor finish_forward();  // S4 ends; S5
  // Gradient of the output [T, H] → gradient of the input.
  void start_backward(const at::Tensor& d_output);  // S5
  void run_experts_backward();                      // S3
  at::Tensor finish_backward();                     // S1

 private:
  bool dense() const { return index_ < 0; }
  void attend(const at::Tensor& hidden, bool first_time);
  // The context of a stage, which adds to `list` what is cheap to make again.
  const LayerContext& noting(RecomputeList& list);

  const DecoderLayer* layer_;
  int64_t index_;
  Options options_;
  LayerContext context_;
  at::Tensor input_;  // kept only for recomputation
  StageGraph attend_, experts_, combine_;
  RecomputeList attend_again_, rows_again_, experts_again_, combine_again_;
  RouterOutput routing_;
  std::optional<ExpertDispatch> exchange_;
  RowMap rows_of_tokens_;           // of what S5 sums
  ExpertRows results_;              // from S3 to S5, its value apart from it in values_
  std::vector<at::Tensor> values_;  // on their way from a step to the next
};

}  // namespace marrow
