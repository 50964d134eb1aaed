// The files of one checkpoint folder: what they are, and how several ranks write parts of them.
#pragma once
#include "models/hub_folder.h"
#include "ops/parameter_spec.h"
#include "ops/pch.h"
#include "train/pretrain_config.h"

namespace marrow {

// A tensor of the model with the optimizer state that a checkpoint keeps for it.
struct CheckpointTensor {
  HubTensor tensor;
  bool exp_avg = true;     // first moment, or Muon's momentum
  bool exp_avg_sq = true;  // second moment
};

// All tensors of the model, whoever holds them. `specs` are those of the whole model.
std::vector<CheckpointTensor> checkpoint_tensors(const std::vector<ParameterSpec>& specs, OptimizerName optimizer);

inline constexpr const char* kCompleteMarker = "COMPLETE";

// Writes model-*.safetensors (fp32 masters) and optimizer-*.safetensors (NAME.exp_avg,
// NAME.exp_avg_sq). Files, headers and offsets are a pure function of `tensors`, so what is written
// does not depend on who writes it. The steps, with a barrier after each:
//   rank 0: create()   all ranks: write(), finish_writing(rank)   rank 0: publish()
// Where rank 0 does not come to publish(), its destructor removes what was written.
class CheckpointFiles {
 public:
  // `folder` is the checkpoint's final path. `state_dtype`: kBFloat16 or kFloat.
  CheckpointFiles(std::string folder, const std::vector<CheckpointTensor>& tensors, at::ScalarType state_dtype,
                  int64_t max_shard_bytes = 5'000'000'000);

  void create();  // the staging folder with every file at its final size
  // Elements [begin, begin + values.numel()) of "NAME", "NAME.exp_avg" or "NAME.exp_avg_sq", in
  // the dtype that is saved. values [n], any device.
  void write(const std::string& name, int64_t begin, const at::Tensor& values);
  void finish_writing(int64_t rank);  // flushes what this rank wrote, notes how much
  // Checks that all bytes were written by ranks 0..ranks-1, flushes, renames, marks as complete.
  void publish(const std::vector<SideFile>& side_files, int64_t ranks);

  const std::string& folder() const { return folder_; }

 private:
  struct Place {
    size_t file = 0;
    const StoredTensor* tensor = nullptr;
  };
  std::string staged(const std::string& name) const { return staging_path(folder_) + "/" + name; }
  void check_all_written(int64_t ranks) const;

  std::string folder_;
  std::vector<SafetensorsLayout> layouts_;
  std::unordered_map<std::string_view, Place> places_;
  std::map<size_t, OutputFile> open_;    // by index in layouts_
  std::optional<StagedFolder> staging_;  // rank 0's
  int64_t tensor_bytes_ = 0;             // of all tensors
  int64_t written_bytes_ = 0;            // by this rank
};

// "DIR/step-00000100"
std::string step_folder(const std::string& dir, int64_t step);
// The step folders in `dir`, newest first, complete or not. A missing `dir` has none.
std::vector<std::string> step_folders(const std::string& dir);
// Errors (kBadInput), naming the file and both sizes, unless `folder` carries the marker of a
// complete checkpoint and every file that it lists has its size.
void check_complete(const std::string& folder);
// Keeps the `keep` newest complete ones (0: all) and always `saved`; removes what an interrupted
// save left.
void remove_old_checkpoints(const std::string& dir, int64_t keep, const std::string& saved);
void remove_stale_staging(const std::string& dir);

}  // namespace marrow
