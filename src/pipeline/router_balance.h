// Router statistics of a step, and what each balance mode makes of them. A layer's loss is E · Σ f_i · P_i.
#pragma once
#include "models/model_contract.h"
#include "parallel/communicator.h"

namespace marrow {

enum class BalanceMode { kNone, kMicro, kSequence, kGlobal, kBias };

// One instance serves all layers of a rank. Per step: begin_step, record for every layer and
// micro-batch, end_step once all ranks' micro-batches are done.
class BalanceTracker {
 public:
  struct Options {
    BalanceMode mode = BalanceMode::kGlobal;
    double coef = 0;
    double z_loss = 0;
    Communicator* context = nullptr;  // ranks that share each sequence; null: this one alone
    Communicator* world = nullptr;    // all ranks; null: this one alone
  };
  // Sizes of one step's global batch, over all ranks.
  struct StepSizes {
    int64_t tokens = 0, sequences = 0, micro_batches = 0;
  };
  // A bias of selection that the model has is used in any mode; only mode bias changes it.
  BalanceTracker(const ModelShape& model, const Options& options, at::Device device);

  void begin_step(const StepSizes& sizes);
  // Groups that the router keeps apart in a micro-batch of `sequences` sequences.
  int64_t groups(int64_t sequences) const { return options_.mode == BalanceMode::kSequence ? sequences : 1; }
  // Adds a micro-batch's statistics and returns, in `balance`, the gradient of its balance term. `tokens` is what this
  // rank has of the micro-batch. Where sequences are shared, and the mode looks at each or at each micro-batch, the
  // ranks that share them add theirs. A recomputed forward (not `first_time`) needs the gradient again, and adds none.
  void record(int64_t layer, const RouterOutput& routing, int64_t tokens, RouterBalance& balance, bool first_time);
  void end_step();  // adds up over all ranks

  // Of the step that ended last, on the device: [layers] fp32 each.
  at::Tensor losses() const { return losses_; }
  at::Tensor load_max_over_mean() const { return load_; }
  // Bias of selection of a layer [E] fp32; undefined where the model has none and the mode is not bias.
  at::Tensor selection_bias(int64_t layer) const;

  // State that a checkpoint keeps: [layers, E] fp32 each. `previous_counts` is the last step's whole global
  // batch; zero before the first step. `bias` is a tensor of the model.
  at::Tensor previous_counts() const { return previous_counts_; }
  at::Tensor bias() const { return bias_; }

 private:
  bool by_group() const { return options_.mode == BalanceMode::kMicro || options_.mode == BalanceMode::kSequence; }

  int64_t experts_, top_k_;
  bool has_bias_;
  Options options_;
  StepSizes sizes_;
  at::Tensor counts_;            // [layers, E] fp64, this step so far
  at::Tensor probability_sums_;  // [layers, E] fp64
  at::Tensor group_losses_;      // [layers] fp64: sum over groups of micro and sequence
  at::Tensor previous_counts_;   // [layers, E] fp32
  at::Tensor bias_;              // [layers, E] fp32
  at::Tensor global_gradient_;   // [layers, E] fp32, of mode global, this step
  at::Tensor losses_, load_;
};

}  // namespace marrow
