#include "train/checkpoint.h"

#include <filesystem>

#include "ops/device.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr const char* kTrainerState = "trainer_state.json";

// Calls visit(values, suffix of their name) for what the range has.
template <typename Range, typename Visit>
void each_part(Range& range, Visit visit) {
  if (range.master.defined()) visit(range.master, "");
  if (range.exp_avg.defined()) visit(range.exp_avg, ".exp_avg");
  if (range.exp_avg_sq.defined()) visit(range.exp_avg_sq, ".exp_avg_sq");
}

// With a gap after them, so that the next ones are aligned.
int64_t aligned_bytes(const at::Tensor& values) { return (static_cast<int64_t>(values.nbytes()) + 63) / 64 * 64; }

}  // namespace

CheckpointWriter::CheckpointWriter(CheckpointWriterOptions options, std::vector<CheckpointTensor> model, Logger& log)
    : options_(std::move(options)), model_(std::move(model)), log_(log) {
  MARROW_CHECK(options_.ranks == 1 || !options_.run.empty(), ExitCode::kUsage,
               Fix("a defect: give CheckpointWriterOptions::run the same unique text on all ranks"),
               "{} ranks save under no common name", options_.ranks);
}

CheckpointWriter::~CheckpointWriter() {
  try {
    finish();
  } catch (const std::exception& error) {
    log_.warn(fmt::format("a checkpoint was not saved: {}", error.what()));
  }
}

void CheckpointWriter::finish() {
  if (pending_.valid()) pending_.get();
}

void CheckpointWriter::poll() {
  const bool done = pending_.valid() && pending_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  if (done) finish();
}

// Moves the values into one host buffer; false where that does not fit beside all else.
bool CheckpointWriter::copy_to_host(std::vector<OwnedRange>& ranges) {
  int64_t bytes = 0;
  const at::Tensor* last_on_device = nullptr;
  for (OwnedRange& range : ranges) {
    each_part(range, [&](at::Tensor& values, const char*) {
      bytes += aligned_bytes(values);
      if (!values.is_cpu()) last_on_device = &values;
    });
  }
  if (!host_.defined() || host_.numel() < bytes) {
    const int64_t available = available_memory_bytes(at::kCPU) / options_.ranks_on_host;
    if (bytes > available / 10 * 9) {
      log_.info(fmt::format("saving synchronously: a copy takes {} bytes of host memory, {} are free for this rank",
                            bytes, available));
      return false;
    }
    host_ = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(last_on_device != nullptr));
  }
  int64_t position = 0;
  for (OwnedRange& range : ranges) {
    each_part(range, [&](at::Tensor& values, const char*) {
      const at::Tensor copy =
          host_.narrow(0, position, static_cast<int64_t>(values.nbytes())).view(values.scalar_type());
      position += aligned_bytes(values);
      // Copies of one stream are done in order: the last one blocks, and so waits for all.
      copy.copy_(values, /*non_blocking=*/&values != last_on_device);
      values = copy;
    });
  }
  return true;
}

void CheckpointWriter::save(CheckpointContent content) {
  finish();
  ++saves_;
  content.side_files.push_back({kTrainerState, to_json(content.state) + "\n"});
  if (!options_.async || !copy_to_host(content.ranges)) {
    write(content);
    return;
  }
  pending_ = std::async(std::launch::async, [this, content = std::move(content)] { write(content); });
}

void CheckpointWriter::write(const CheckpointContent& content) try {
  const std::string folder = step_folder(options_.dir, content.state.step);
  CheckpointFiles files(folder, model_, options_.state_dtype, options_.max_shard_bytes);
  if (options_.rank == 0) remove_stale_staging(options_.dir);
  files.open(options_.rank, fmt::format("{}-{}", options_.run, saves_), options_.timeout_seconds);
  for (const OwnedRange& range : content.ranges) {
    each_part(range, [&](const at::Tensor& values, const char* suffix) {
      files.write(range.tensor->name + suffix, range.begin, values.detach());
    });
  }
  files.finish_writing();
  if (options_.rank != 0) return;
  files.publish(content.side_files, options_.ranks, options_.timeout_seconds);
  remove_old_checkpoints(options_.dir, options_.keep, folder);
} catch (Error& error) {
  throw error.add_who("saving " + step_folder(options_.dir, content.state.step));
}

Checkpoint::Checkpoint(const std::string& folder, const ContentCheck& check)
    : folder_(folder),
      state_((check_complete(folder), check_contents(folder, check),
              parse_trainer_state(Json::read_file(folder + "/" + kTrainerState)))),
      config_(Json::read_file(folder + "/config.json")) {
  TensorFiles headers_are_sound(tensor_paths(folder, ""));
}

void Checkpoint::load_optimizer(const std::vector<OwnedRange>& ranges) const {
  MARROW_CHECK(state_.optimizer != "none", ExitCode::kUsage,
               Fix("start a new run from it: set model.init_from to this folder"),
               "checkpoint {} holds no optimizer state to resume from", folder_);
  const TensorFiles files(tensor_paths(folder_, "optimizer-"));
  for (const OwnedRange& range : ranges) {
    const auto load = [&](const at::Tensor& values, const char* suffix) {
      const std::string name = range.tensor->name + suffix;
      const StoredTensor* stored = files.find(name);
      MARROW_CHECK((stored != nullptr) == values.defined(), ExitCode::kBadInput,
                   Fix("use the optimizer.name that the checkpoint was saved with"),
                   "{}: tensor {} is {} in the checkpoint, but the optimizer {}", folder_, name,
                   stored != nullptr ? "present" : "missing", values.defined() ? "needs it" : "has no place for it");
      if (stored == nullptr) return;
      const bool fits = stored->shape == range.tensor->shape && stored->dtype == values.scalar_type();
      MARROW_CHECK(fits, ExitCode::kBadInput, Fix("use the model and the optimizer.state_dtype of the checkpoint"),
                   "{}: tensor {} is {} {} in the checkpoint, but {} {} in the run", folder_, name,
                   dtype_name(stored->dtype), shape_text(stored->shape), at::toString(values.scalar_type()),
                   shape_text(range.tensor->shape));
      files.read(name, range.begin, values);
    };
    load(range.exp_avg, ".exp_avg");
    load(range.exp_avg_sq, ".exp_avg_sq");
  }
}

std::optional<Checkpoint> newest_checkpoint(const std::string& dir, Logger& log, const ContentCheck& check) {
  for (const std::string& folder : step_folders(dir)) {
    std::optional<Checkpoint> newest;
    try {
      newest.emplace(folder, check);
    } catch (const Error& error) {
      log.warn(fmt::format("skipping a checkpoint: {}", error.what()));
    }
    if (check.all_agree(newest.has_value())) return newest;
    if (newest) log.warn(fmt::format("skipping checkpoint {}: another rank found it damaged", folder));
  }
  return std::nullopt;
}

bool is_checkpoint_path(const std::string& path, std::string_view wanted) {
  if (!fs::exists(path)) {
    const std::vector<std::string> beside = step_folders(fs::absolute(path).parent_path().string());
    const auto whole =
        std::ranges::find_if(beside, [](const auto& f) { return fs::exists(f + "/" + kCompleteMarker); });
    const std::string near = whole == beside.end() ? "" : ": the newest one beside it is " + *whole;
    MARROW_THROW(ExitCode::kUsage, Fix("give {}{}", wanted, near), "{} does not exist", path);
  }
  return fs::exists(path + "/" + kTrainerState) || fs::exists(path + "/" + kCompleteMarker) ||
         !step_folders(path).empty() || !step_folders(path + "/checkpoints").empty();
}

Checkpoint open_checkpoint(const std::string& path, Logger& log) {
  MARROW_CHECK(is_checkpoint_path(path), ExitCode::kUsage, Fix("give a run's folder, or one of its checkpoints"),
               "{} holds no checkpoint", path);
  for (const std::string& dir : {path, path + "/checkpoints"}) {
    if (step_folders(dir).empty()) continue;
    std::optional<Checkpoint> newest = newest_checkpoint(dir, log, {.optimizer = false});
    MARROW_CHECK(newest.has_value(), ExitCode::kBadInput, Fix("train anew: none can be used"),
                 "no checkpoint in {} is complete", dir);
    return std::move(*newest);
  }
  return Checkpoint(path);
}

}  // namespace marrow
