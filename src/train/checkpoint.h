// Checkpoints that do not depend on the mesh. DIR/step-00000100/ holds model-*.safetensors (fp32
// masters under the Hub's names), optimizer-*.safetensors, trainer_state.json, router_state.json,
// config.json, run.toml, tokenizer files and the marker COMPLETE.
#pragma once
#include <future>

#include "base/log.h"
#include "parallel/parameter_store.h"
#include "train/checkpoint_files.h"
#include "train/trainer_state.h"

namespace marrow {

// What one save writes, as one rank sees it.
struct CheckpointContent {
  TrainerState state;
  std::vector<OwnedRange> ranges;    // of this rank; the ranks' together hold each element once
  std::vector<SideFile> side_files;  // config.json, run.toml, router state, tokenizer files; rank 0's
};

struct CheckpointWriterOptions {
  std::string dir;
  int64_t keep = 2;  // newest complete ones; 0 = all
  bool async = true;
  int64_t rank = 0, ranks = 1;
  int64_t ranks_on_host = 1;                // they share the memory for asynchronous copies
  at::ScalarType state_dtype = at::kFloat;  // of the optimizer state, or kBFloat16
  int64_t max_shard_bytes = 5'000'000'000;
  std::string run;  // this run's name, alike on all ranks and unlike that of any other run; one rank needs none
  double timeout_seconds = 600;  // for the other ranks
};

// Saves. With `async`, save() returns once everything is copied to host memory; a thread writes,
// and what goes wrong there is thrown by the next call of any member.
class CheckpointWriter {
 public:
  // `model`: every tensor of the model (checkpoint_tensors). `log`, and what a save reads, must outlive this.
  CheckpointWriter(CheckpointWriterOptions options, std::vector<CheckpointTensor> model, Logger& log);
  ~CheckpointWriter();  // waits; errors are only logged: call finish() first
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Waits for the previous save, then saves as DIR/step-N. Collective. Errors: kDeviceFault for
  // the disk, with earlier checkpoints untouched and the temporary removed.
  void save(CheckpointContent content);
  void poll();    // throws the error of a save in the background, if it has failed by now
  void finish();  // waits for the save in the background and throws its error

 private:
  bool copy_to_host(std::vector<OwnedRange>& ranges);
  void write(const CheckpointContent& content);

  CheckpointWriterOptions options_;
  std::vector<CheckpointTensor> model_;
  Logger& log_;
  at::Tensor host_;            // bytes, kept between saves: pinning memory is slow
  int64_t saves_ = 0;          // begun so far
  std::future<void> pending_;  // the save in the background
};

// A complete checkpoint, open for reading.
class Checkpoint {
 public:
  // Errors (kBadInput) that name what is missing or damaged; reads the files that `check` says.
  explicit Checkpoint(const std::string& folder, const ContentCheck& check = {.optimizer = false});

  const std::string& folder() const { return folder_; }
  const TrainerState& state() const { return state_; }
  const Json& config() const { return config_; }  // the model's config.json

  // Fills exp_avg and exp_avg_sq where they are defined; their absence in the files is an error.
  void load_optimizer(const std::vector<OwnedRange>& ranges) const;

 private:
  std::string folder_;
  TrainerState state_;
  Json config_;
};

// The newest sound checkpoint in `dir`, if any, the same on all ranks. Warnings name newer damaged or unfinished ones.
std::optional<Checkpoint> newest_checkpoint(const std::string& dir, Logger& log, const ContentCheck& check = {});
// `path` itself where it is a checkpoint, else the newest one in it or in its checkpoints/.
Checkpoint open_checkpoint(const std::string& path, Logger& log);
// Is `path` meant as a checkpoint (or holds some), rather than a Hugging Face folder? Error (kUsage) where nothing is
// there: its fix says to give `wanted`, and names the newest complete checkpoint beside.
bool is_checkpoint_path(const std::string& path,
                        std::string_view wanted = "a checkpoint, a run's folder or a Hugging Face folder");

}  // namespace marrow
