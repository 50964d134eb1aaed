#include "train/checkpoint.h"

#include <filesystem>

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr const char* kTrainerState = "trainer_state.json";
constexpr const char* kRouterState = "router_state.safetensors";

std::string join(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / name).string();
}

// A whole safetensors file in memory, for state of a few kilobytes.
std::string small_file(const std::vector<NamedTensor>& tensors) {
  std::vector<TensorDeclaration> declarations;
  for (const NamedTensor& entry : tensors) {
    declarations.push_back(
        {entry.name, stored_dtype(entry.tensor.scalar_type()), entry.tensor.sizes().vec()});
  }
  std::string text = layout_safetensors(kRouterState, declarations).header;
  for (const NamedTensor& entry : tensors) {
    const at::Tensor values = entry.tensor.detach().cpu().contiguous();
    text.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  return text;
}

// MemAvailable of the kernel, or "plenty" where it does not say.
int64_t available_host_bytes() {
  const std::string text = read_text_file("/proc/meminfo", ExitCode::kDeviceFault);
  const size_t at = text.find("MemAvailable:");
  return at == std::string::npos ? INT64_MAX : std::atoll(text.c_str() + at + 13) * 1024;
}

std::vector<std::string> files_with_prefix(const std::string& folder, std::string_view prefix) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix) && name.ends_with(".safetensors")) {
      paths.push_back(entry.path().string());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

void check_values(const OwnedRange& range, const at::Tensor& values, std::string_view what) {
  MARROW_CHECK(values.dim() == 1 && values.numel() == range.end - range.begin, ExitCode::kUsage,
               Fix("this is a defect: owned ranges hold 1-D views of their length"),
               "{} of {} has shape {} for the elements [{}, {})", what, range.tensor->name,
               shape_text(values.sizes().vec()), range.begin, range.end);
}

}  // namespace

CheckpointWriter::CheckpointWriter(CheckpointWriterOptions options,
                                   std::vector<CheckpointTensor> model, Logger& log)
    : options_(std::move(options)), model_(std::move(model)), log_(log) {
  for (const CheckpointTensor& entry : model_) by_name_.emplace(entry.tensor.name, &entry);
}

CheckpointWriter::~CheckpointWriter() {
  try {
    finish();
  } catch (const std::exception& error) {
    log_.warn(fmt::format("a checkpoint was not saved: {}", error.what()));
  }
}

void CheckpointWriter::finish() {
  if (thread_.joinable()) thread_.join();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void CheckpointWriter::poll() {
  if (!writing_) finish();
}

int64_t CheckpointWriter::host_bytes(const std::vector<OwnedRange>& ranges) {
  int64_t bytes = 0;
  for (const OwnedRange& range : ranges) {
    for (const at::Tensor& values : {range.master, range.exp_avg, range.exp_avg_sq}) {
      if (values.defined()) bytes += static_cast<int64_t>(values.nbytes() + 63) / 64 * 64;
    }
  }
  return bytes;
}

std::vector<CheckpointWriter::Piece> CheckpointWriter::pieces_of(
    const std::vector<OwnedRange>& ranges) const {
  const at::ScalarType state =
      options_.state_dtype == TensorDtype::kBF16 ? at::kBFloat16 : at::kFloat;
  std::vector<Piece> pieces;
  for (const OwnedRange& range : ranges) {
    const std::string& name = range.tensor->name;
    const auto known = by_name_.find(name);
    MARROW_CHECK(known != by_name_.end(), ExitCode::kUsage,
                 Fix("this is a defect: list the tensor in checkpoint_tensors"),
                 "tensor {} is not among the model's", name);
    const auto add = [&](const at::Tensor& values, const char* suffix, at::ScalarType dtype) {
      check_values(range, values, *suffix == 0 ? "master" : suffix + 1);
      MARROW_CHECK(values.scalar_type() == dtype, ExitCode::kUsage,
                   Fix("this is a defect: masters are fp32, states of optimizer.state_dtype"),
                   "{}{} is {}, but is saved as {}", name, suffix,
                   at::toString(values.scalar_type()), at::toString(dtype));
      pieces.push_back({name + suffix, range.begin, values.detach()});
    };
    const auto add_state = [&](const at::Tensor& values, const char* suffix, bool wanted) {
      MARROW_CHECK(values.defined() == wanted, ExitCode::kUsage,
                   Fix("this is a defect: checkpoint_tensors and the optimizer disagree"),
                   "{}{} is {}, but the checkpoint {} it", name, suffix,
                   values.defined() ? "given" : "undefined", wanted ? "needs" : "has no place for");
      if (wanted) add(values, suffix, state);
    };
    add(range.master, "", at::kFloat);
    add_state(range.exp_avg, ".exp_avg", known->second->exp_avg);
    add_state(range.exp_avg_sq, ".exp_avg_sq", known->second->exp_avg_sq);
  }
  return pieces;
}

// Moves the pieces into one host buffer; false where that does not fit beside all else.
bool CheckpointWriter::copy_to_host(std::vector<Piece>& pieces) {
  int64_t bytes = 0;
  const Piece* last_on_device = nullptr;
  for (const Piece& piece : pieces) {
    bytes += static_cast<int64_t>(piece.values.nbytes() + 63) / 64 * 64;
    if (!piece.values.is_cpu()) last_on_device = &piece;
  }
  if (!host_.defined() || host_.numel() < bytes) {
    const int64_t available = available_host_bytes() / options_.ranks_on_host;
    if (bytes > available / 10 * 9) {
      log_.info(
          fmt::format("saving synchronously: a copy takes {} bytes of host memory, of which "
                      "{} are free for this rank",
                      bytes, available));
      return false;
    }
    host_ =
        at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(last_on_device != nullptr));
  }
  int64_t position = 0;
  for (Piece& piece : pieces) {
    const int64_t size = static_cast<int64_t>(piece.values.nbytes());
    const at::Tensor copy = host_.narrow(0, position, size).view(piece.values.scalar_type());
    // Copies of one stream are done in order: the last one blocks, and so waits for all.
    copy.copy_(piece.values, /*non_blocking=*/&piece != last_on_device);
    piece.values = copy;
    position += (size + 63) / 64 * 64;
  }
  return true;
}

void CheckpointWriter::save(const CheckpointContent& content) {
  finish();
  std::vector<Piece> pieces = pieces_of(content.ranges);
  std::vector<SideFile> side_files = content.side_files;
  side_files.push_back({kTrainerState, to_json(content.state) + "\n"});
  if (!content.router_state.empty()) {
    side_files.push_back({kRouterState, small_file(content.router_state)});
  }
  if (!options_.async || !copy_to_host(pieces)) {
    write(pieces, content.state, side_files);
    return;
  }
  writing_ = true;
  thread_ = std::thread([this, pieces = std::move(pieces), state = content.state,
                         side_files = std::move(side_files)] {
    try {
      write(pieces, state, side_files);
    } catch (...) {
      failure_ = std::current_exception();
    }
    writing_ = false;
  });
}

void CheckpointWriter::write(const std::vector<Piece>& pieces, const TrainerState& state,
                             const std::vector<SideFile>& side_files) {
  CheckpointFiles files(step_folder(options_.dir, state.step), model_, options_.state_dtype,
                        options_.max_shard_bytes);
  try {
    write_steps(files, pieces, side_files);
  } catch (Error& error) {
    files.remove_staging();
    throw error.add_who(fmt::format("saving {}", files.folder()));
  }
}

void CheckpointWriter::write_steps(CheckpointFiles& files, const std::vector<Piece>& pieces,
                                   const std::vector<SideFile>& side_files) {
  const bool first = options_.rank == 0;
  if (first) {
    remove_stale_staging(options_.dir);
    files.create();
  }
  options_.barrier();
  for (const Piece& piece : pieces) files.write(piece.name, piece.begin, piece.values);
  files.finish_writing(options_.rank);
  options_.barrier();
  if (first) {
    files.publish(side_files, options_.ranks);
    remove_old_checkpoints(options_.dir, options_.keep, files.folder());
  }
  options_.barrier();
}

Checkpoint::Checkpoint(const std::string& folder)
    : folder_(folder),
      state_((check_complete(folder),
              parse_trainer_state(Json::read_file(join(folder, kTrainerState))))),
      config_(Json::read_file(join(folder, "config.json"))) {
  TensorFiles headers_are_sound(files_with_prefix(folder, ""));
}

void Checkpoint::load_weights(const std::vector<HubTensor>& model, bool tied_embeddings,
                              const std::vector<OwnedRange>& ranges) const {
  const ModelWeights weights(folder_, model, {.tied_embeddings = tied_embeddings});
  for (const OwnedRange& range : ranges) {
    check_values(range, range.master, "master");
    weights.read(*range.tensor, range.begin, range.master);
  }
}

void Checkpoint::load_optimizer(const std::vector<OwnedRange>& ranges) const {
  MARROW_CHECK(state_.optimizer != "none", ExitCode::kUsage,
               Fix("start a new run from it: set model.init_from to this folder"),
               "checkpoint {} holds no optimizer state to resume from", folder_);
  const TensorFiles files(files_with_prefix(folder_, "optimizer-"));
  for (const OwnedRange& range : ranges) {
    const auto load = [&](const at::Tensor& values, const char* suffix) {
      const std::string name = range.tensor->name + suffix;
      const StoredTensor* stored = files.find(name);
      MARROW_CHECK((stored != nullptr) == values.defined(), ExitCode::kBadInput,
                   Fix("use the optimizer.name that the checkpoint was saved with"),
                   "{}: tensor {} is {} in the checkpoint, but the optimizer {}", folder_, name,
                   stored != nullptr ? "present" : "missing",
                   values.defined() ? "needs it" : "has no place for it");
      if (stored == nullptr) return;
      MARROW_CHECK(stored->shape == range.tensor->shape, ExitCode::kBadInput,
                   Fix("check that the checkpoint belongs to this model"),
                   "{}: tensor {} is {} in the checkpoint, but {} in the model", folder_, name,
                   shape_text(stored->shape), shape_text(range.tensor->shape));
      MARROW_CHECK(scalar_type(*stored) == values.scalar_type(), ExitCode::kBadInput,
                   Fix("use the optimizer.state_dtype that the checkpoint was saved with"),
                   "{}: tensor {} is {} in the checkpoint, but {} in the run", folder_, name,
                   dtype_name(stored->dtype), at::toString(values.scalar_type()));
      check_values(range, values, suffix + 1);
      files.read(name, range.begin, values);
    };
    load(range.exp_avg, ".exp_avg");
    load(range.exp_avg_sq, ".exp_avg_sq");
  }
}

std::vector<NamedTensor> Checkpoint::router_state() const {
  const std::string path = join(folder_, kRouterState);
  if (!fs::exists(path)) return {};
  const TensorFiles files({path});
  std::vector<NamedTensor> tensors;
  for (const std::string& name : files.names()) tensors.push_back({name, files.read_whole(name)});
  return tensors;
}

std::optional<Checkpoint> newest_checkpoint(const std::string& dir, Logger& log) {
  for (const std::string& folder : step_folders(dir)) {
    try {
      return Checkpoint(folder);
    } catch (const Error& error) {
      log.warn(fmt::format("skipping a checkpoint: {}", error.what()));
    }
  }
  return std::nullopt;
}

bool is_checkpoint_path(const std::string& path) {
  return fs::exists(join(path, kCompleteMarker)) || fs::exists(join(path, kTrainerState)) ||
         !step_folders(path).empty() || !step_folders(join(path, "checkpoints")).empty();
}

Checkpoint open_checkpoint(const std::string& path, Logger& log) {
  MARROW_CHECK(fs::is_directory(path), ExitCode::kUsage, Fix("check the path"),
               "{} is no folder, so no checkpoint", path);
  for (const std::string& dir : {path, join(path, "checkpoints")}) {
    if (step_folders(dir).empty()) continue;
    std::optional<Checkpoint> newest = newest_checkpoint(dir, log);
    MARROW_CHECK(newest.has_value(), ExitCode::kBadInput, Fix("train anew: none can be used"),
                 "no checkpoint in {} is complete", dir);
    return std::move(*newest);
  }
  return Checkpoint(path);
}

}  // namespace marrow
