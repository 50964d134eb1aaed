// The training run: data in, steps, validation, checkpoints, metrics.
#pragma once
#include "base/log.h"
#include "base/stop_signal.h"
#include "data/batch_loader.h"
#include "ops/device.h"
#include "parallel/mesh_communicators.h"
#include "parallel/parameter_store.h"
#include "parallel/transfer_record.h"
#include "pipeline/executor.h"
#include "train/checkpoint.h"
#include "train/metrics.h"
#include "train/optimizer.h"
#include "train/pretrain_config.h"

namespace marrow {

class PretrainLoop {
 public:
  // Opens model, corpora and the run folder, and loads the newest checkpoint or initial values. Every
  // rank of the run constructs one. What it is given outlives the loop; it opens `records` where ranks are many.
  PretrainLoop(const PretrainConfig& config, Bootstrap& bootstrap, RunRecords& records, Logger& logger);

  // Trains up to config.train.steps, or until `stop` asks on any rank; then saves. Returns the last step.
  int64_t run(StopSignal& stop);
  bool stopped() const { return stopping_; }  // before the last step, since `stop` asked

 private:
  // A step whose numbers are still on their way from the device.
  struct PendingStep {
    int64_t step = 0;
    int64_t targets = 0;
    double learning_rate = 0;
    DeviceMark end;         // before `values` in the queue: past once they are here
    DeferredValues values;  // who asks to stop, rows sent, Σ loss, gradient norm, balance losses, expert loads
  };

  void open_inputs();
  void open_data();
  void open_run_folder();
  void make_links();
  void make_engine();
  void describe_run();
  void describe_start();
  bool left_to_do() const { return state_.step < config_.train.steps; }
  std::optional<Checkpoint> checkpoint_to_resume();
  void resume_from(const Checkpoint& checkpoint);
  void initialize_from(const std::string& path);

  MicroBatch load_micro_batch(int64_t index) const;
  PendingStep launch_step(int64_t step, ActionTimer* timer);
  PendingStep launch_traced(int64_t step);
  void report(PendingStep pending);
  void check_finite(int64_t step, double loss, double grad_norm);
  void validate(int64_t step);
  void save(int64_t step);
  template <typename Body>
  auto with_step(int64_t step, Body body);

  PretrainConfig config_;
  Bootstrap& bootstrap_;
  RunRecords& records_;
  Logger& logger_;
  Mesh mesh_;
  std::string model_config_text_;
  std::unique_ptr<MoeModel> model_;
  double flops_per_token_ = 0;  // of a forward
  at::Device device_;
  std::optional<FileLock> lock_, checkpoint_lock_;  // of log.dir and checkpoint.dir
  std::optional<BatchLoader> loader_;
  TrainerState state_;
  std::vector<SideFile> tokenizer_files_;
  std::vector<BatchLoader> validation_;
  MeshCommunicators links_;
  ModelParts parts_;
  std::optional<ParameterStore> store_;
  std::optional<BalanceTracker> tracker_;
  std::optional<Executor> executor_;
  std::optional<Optimizer> optimizer_;
  std::optional<CheckpointWriter> checkpoints_;
  std::optional<MetricsWriter> metrics_;

  int64_t saved_step_ = -1;
  StopSignal* stop_ = nullptr;
  bool stop_told_ = false;  // to the user
  bool stopping_ = false;
  std::optional<DeviceMark> last_end_;  // of a step or validation, where the next one's time begins
};

}  // namespace marrow
