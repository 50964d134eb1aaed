// The files of one checkpoint folder: what they are, and how several ranks write parts of them.
#pragma once
#include "models/hub_folder.h"
#include "models/model_contract.h"
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

// All tensors of the model, whoever holds them.
std::vector<CheckpointTensor> checkpoint_tensors(const MoeModel& model, OptimizerName optimizer);

inline constexpr const char* kCompleteMarker = "COMPLETE";

// Writes model-*.safetensors (fp32 masters) and optimizer-*.safetensors (NAME.exp_avg, NAME.exp_avg_sq). Files, headers
// and offsets are a pure function of `tensors`, so what is written does not depend on who writes it:
//   all: open(), write(), finish_writing()   rank 0: publish()
// Ranks meet through notes in the staging folder, which all must see: no communicator is used, so this may run beside
// training. Where rank 0 does not come to publish(), its destructor removes what was written.
class CheckpointFiles {
 public:
  // `folder` is the checkpoint's final path. `state_dtype`: kBFloat16 or kFloat.
  CheckpointFiles(std::string folder, const std::vector<CheckpointTensor>& tensors, at::ScalarType state_dtype,
                  int64_t max_shard_bytes = 5'000'000'000);

  // Rank 0 makes the staging folder with every file at its final size; the others wait for it. `save` names this save,
  // alike on all ranks and unlike any before it: notes of another are none.
  void open(int64_t rank = 0, const std::string& save = "only", double timeout_seconds = 0);
  // Elements [begin, begin + values.numel()) of "NAME", "NAME.exp_avg" or "NAME.exp_avg_sq", in
  // the dtype that is saved. values [n], any device.
  void write(const std::string& name, int64_t begin, const at::Tensor& values);
  void finish_writing();  // flushes what this rank wrote, notes how much
  // Waits for ranks 0..ranks-1, checks that they wrote all bytes, flushes, renames, marks as complete.
  void publish(const std::vector<SideFile>& side_files, int64_t ranks = 1, double timeout_seconds = 0);

 private:
  std::string staged(const std::string& name) const { return staging_path(folder_) + "/" + name; }
  void gather_notes(int64_t ranks, double timeout_seconds);

  std::string folder_, save_;
  int64_t rank_ = 0;
  std::vector<SafetensorsLayout> layouts_;
  std::vector<uint64_t> checksums_;  // of what this rank wrote, by index in layouts_
  std::unordered_map<std::string_view, std::pair<size_t, const StoredTensor*>> places_;  // with the index in layouts_
  std::map<size_t, OutputFile> open_;                                                    // by index in layouts_
  std::optional<StagedFolder> staging_;                                                  // rank 0's
  int64_t tensor_bytes_ = 0;                                                             // of all tensors
  int64_t written_bytes_ = 0;                                                            // by this rank
};

// "DIR/step-00000100"
std::string step_folder(const std::string& dir, int64_t step);
// The step folders in `dir`, newest first, complete or not. A missing `dir` has none.
std::vector<std::string> step_folders(const std::string& dir);
// Errors (kBadInput), naming the file and both sizes, unless `folder` carries the marker of a
// complete checkpoint and every file that it lists has its size.
void check_complete(const std::string& folder);

// How the ranks of a run read a checkpoint's files to compare them with its checksums.
struct ContentCheck {
  bool optimizer = true;                                                   // the optimizer-* files too
  int64_t rank = 0, ranks = 1;                                             // each reads every ranks-th file
  std::function<bool(bool)> all_agree = [](bool sound) { return sound; };  // collective: is it true on every rank?
};
// Errors (kBadInput) that name the file which is not as it was saved.
void check_contents(const std::string& folder, const ContentCheck& check);

// Σ over the file's 4-byte words of word · weight(index), mod 2^64: those of disjoint ranges of a file add up to the
// file's, and a change of one word always shows. `offset`: where in the file `bytes` begin.
uint64_t range_checksum(std::span<const std::byte> bytes, int64_t offset);

// Keeps the `keep` newest complete ones (0: all) and always `saved`; removes what an interrupted save left.
void remove_old_checkpoints(const std::string& dir, int64_t keep, const std::string& saved);
void remove_stale_staging(const std::string& dir);

}  // namespace marrow
