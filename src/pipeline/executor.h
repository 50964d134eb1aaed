// Runs micro-batches through a rank's part of the model as the pipeline schedule says.
#pragma once
#include <deque>

#include "pipeline/action_timer.h"
#include "pipeline/layer_pass.h"
#include "pipeline/micro_batch.h"
#include "pipeline/model_setup.h"

namespace marrow {

// Micro-batch i of a step, made when it is first needed.
using MicroBatchSource = std::function<MicroBatch(int64_t)>;

class Executor {
 public:
  struct Options {
    bool recompute_layers = false;
    bool recompute_cheap = false;
    bool forced_routing = false;
    bool deterministic = false;
    bool overlap = true;  // false: every exchange of tokens is waited for where it starts
  };
  // Model, store (with all its groups), and what `parts` points to outlive it. `tracker` may be null at inference.
  Executor(const MoeModel& model, const ModelParts& parts, ParameterStore& store, BalanceTracker* tracker,
           const Options& options);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Forward and backward of `count` micro-batches of one shape. Gradients of gradient_scale · Σ loss,
  // and those of the balance terms, are added to the parameters' gradients; Σ loss to `loss_sum` ([1]
  // fp64) on the rank that has the head. Waits for a group's parameters where it first needs them, and
  // starts to reduce its gradients once the last is there. `timer` (may be null) sees every action.
  void train(int64_t count, const MicroBatchSource& source, double gradient_scale, const at::Tensor& loss_sum,
             ActionTimer* timer = nullptr);

  // Σ loss over the targets of `count` micro-batches, [1] fp64; 0 on ranks without the head. No gradients.
  at::Tensor evaluate(int64_t count, const MicroBatchSource& source);

  // Rows that this rank's forwards have sent to other ranks' experts since the last call.
  int64_t take_rows_sent() { return std::exchange(rows_sent_, 0); }

  // One rank alone: the normalised output of the last layer [T, H], for generation
  // (batch.context.cache set), and logits [T, V] fp32 of it.
  at::Tensor hidden_states(MicroBatch batch);
  at::Tensor logits(const at::Tensor& hidden) const;

 private:
  // A micro-batch in a chunk, from its forward to its weight gradients.
  struct Flight {
    MicroBatch batch;
    std::vector<LayerPass> layers;
    at::Tensor values;  // [T, H]: hidden states, or their gradient
    WeightGradQueue weight_grads;
  };
  using Groups = std::span<FlatGroup>;  // of the store, which are gathered and reduced together
  struct Layer {
    std::unique_ptr<DecoderLayer> layer;
    Groups groups;
  };
  // What a neighbour sends, in its order.
  struct Link {
    Communicator* channel = nullptr;
    std::vector<PipelineMessage> messages;  // of this step
    size_t received = 0;                    // of them
  };

  void begin_step(int64_t count, const MicroBatchSource& source, bool backward);
  void run(const PipelineAction& action);
  void run_passes(const PipelinePass& forward, const PipelinePass& backward, bool weight_grads);
  void run_layers(const PipelinePass& forward, Flight* down, const PipelinePass& backward, Flight* up,
                  bool weight_grads);
  void run_weight_grads(const PipelinePass& pass);
  void end_step();

  Flight& start_forward(const PipelinePass& pass);
  void start_layer(Flight& flight, int64_t layer);
  void finish_layer(Flight& flight, int64_t layer);
  void finish_forward(const PipelinePass& pass, Flight& flight);
  void run_head(const PipelinePass& pass, Flight& flight);
  void start_layer_backward(Flight& flight, int64_t layer);
  void finish_layer_backward(const PipelinePass& pass, Flight& flight, int64_t layer, bool weight_grads);
  void finish_backward(const PipelinePass& pass, Flight& flight, bool weight_grads);

  at::Tensor take(bool forward, const PipelinePass& pass);
  void hand_on(bool forward, const PipelinePass& pass, at::Tensor values);
  void wait_for_oldest_send();

  MicroBatch& made_batch(int64_t index);
  const Parameter& head() const;
  void acquire(Groups groups);
  void release(Groups groups);
  void open_gradients(Groups groups);
  void start_reduce(Groups groups, int64_t micro_batch);

  const MoeModel* model_;
  ModelParts parts_;
  ParameterStore* store_;
  LayerPass::Options layer_options_;
  int64_t rows_sent_ = 0;
  Options options_;
  at::Device device_;
  RopeTable rope_;
  std::map<int64_t, Layer> layers_;  // of this rank, by index in the model
  Groups embedding_, head_;          // empty where another rank has them
  Groups tied_;                      // what the head reads beside its own: the embedding, or nothing

  // Of the step that runs. Keys: slot, micro-batch; forward, slot, micro-batch.
  const MicroBatchSource* source_ = nullptr;
  int64_t count_ = 0;
  ActionTimer* timer_ = nullptr;
  double gradient_scale_ = 0;
  at::Tensor loss_sum_;                    // [1] fp64
  std::map<int64_t, MicroBatch> batches_;  // made, and not yet read by all chunks
  std::map<std::pair<int64_t, int64_t>, Flight> flights_;
  std::map<std::tuple<bool, int64_t, int64_t>, at::Tensor> mail_;  // arrived, not yet needed
  std::vector<int64_t> message_shape_;
  Link from_previous_, from_next_;
  std::deque<PendingTransfer> sends_;
  Groups reducing_;  // by_layer: their whole gradients stay until the next reduction has started
};

}  // namespace marrow
