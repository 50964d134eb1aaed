#include "train/checkpoint_files.h"

#include <filesystem>

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kWriteElements = int64_t{1} << 26;
constexpr std::string_view kStepPrefix = "step-";

std::string written_note(int64_t rank) { return fmt::format("rank-{:05}.written", rank); }

std::string file_name(const std::string& path) { return fs::path(path).filename().string(); }

// JSON with the size of every file of the folder.
std::string marker_text(const std::string& folder) {
  std::map<std::string, int64_t> sizes;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() != kCompleteMarker) {
      sizes[entry.path().filename().string()] = static_cast<int64_t>(entry.file_size());
    }
  }
  JsonWriter files;
  for (const auto& [name, size] : sizes) files.field(name, size);
  return JsonWriter().field("format", 1).raw("files", files.text()).text() + "\n";
}

bool is_complete(const std::string& folder) {
  try {
    check_complete(folder);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Hidden first, so that a kill half-way leaves no damaged checkpoint behind.
void remove_checkpoint(const std::string& folder) {
  std::error_code ignored;
  fs::rename(folder, staging_path(folder), ignored);
  fs::remove_all(staging_path(folder), ignored);
}

}  // namespace

std::vector<CheckpointTensor> checkpoint_tensors(const std::vector<ParameterSpec>& specs,
                                                 OptimizerName optimizer) {
  std::vector<CheckpointTensor> tensors;
  for (const ParameterSpec& spec : specs) {
    const bool muon = optimizer == OptimizerName::kMuon && spec.rule == UpdateRule::kMuon;
    for (const HubTensor& part : spec.parts) tensors.push_back({part, true, !muon});
  }
  return tensors;
}

CheckpointFiles::CheckpointFiles(std::string folder, const std::vector<CheckpointTensor>& tensors,
                                 TensorDtype state_dtype, int64_t max_shard_bytes)
    : folder_(std::move(folder)) {
  std::vector<TensorDeclaration> masters, states;
  for (const CheckpointTensor& entry : tensors) {
    const HubTensor& tensor = entry.tensor;
    masters.push_back({tensor.name, TensorDtype::kF32, tensor.shape});
    if (entry.exp_avg) states.push_back({tensor.name + ".exp_avg", state_dtype, tensor.shape});
    if (entry.exp_avg_sq) {
      states.push_back({tensor.name + ".exp_avg_sq", state_dtype, tensor.shape});
    }
  }
  layouts_ = layout_shards("model", masters, max_shard_bytes);
  for (auto& layout : layout_shards("optimizer", states, max_shard_bytes)) {
    layouts_.push_back(std::move(layout));
  }
  open_.resize(layouts_.size());
  for (size_t i = 0; i < layouts_.size(); ++i) {
    for (const StoredTensor& tensor : layouts_[i].tensors) {
      places_.emplace(tensor.name, Place{i, &tensor});
      tensor_bytes_ += tensor.end - tensor.begin;
    }
  }
}

std::string CheckpointFiles::staged(const std::string& name) const {
  return (fs::path(staging_path(folder_)) / name).string();
}

void CheckpointFiles::create() {
  staging_ = std::make_unique<StagedFolder>(folder_, tensor_bytes_);
  for (const SafetensorsLayout& layout : layouts_) {
    OutputFile file(staged(layout.file_name));
    file.append(std::as_bytes(std::span(layout.header.data(), layout.header.size())));
    file.truncate_to(layout.file_bytes);
    file.close();
  }
}

OutputFile& CheckpointFiles::open_file(size_t index) {
  if (!open_[index]) open_[index].emplace(staged(layouts_[index].file_name), true);
  return *open_[index];
}

void CheckpointFiles::write(const std::string& name, int64_t begin, const at::Tensor& values) {
  const auto found = places_.find(name);
  MARROW_CHECK(found != places_.end(), ExitCode::kUsage,
               Fix("this is a defect: list the tensor in checkpoint_tensors"),
               "the checkpoint has no place for {}", name);
  const StoredTensor& tensor = *found->second.tensor;
  MARROW_CHECK(begin >= 0 && begin + values.numel() <= tensor.elements(), ExitCode::kUsage,
               Fix("this is a defect: check the owned ranges"),
               "elements [{}, {}) of {} {} were given", begin, begin + values.numel(), name,
               shape_text(tensor.shape));
  const at::ScalarType dtype = scalar_type(tensor);
  const bool direct = values.is_cpu() && values.scalar_type() == dtype && values.is_contiguous();
  const int64_t width = byte_width(tensor.dtype);
  for (int64_t done = 0; done < values.numel(); done += kWriteElements) {
    const int64_t n = std::min(kWriteElements, values.numel() - done);
    at::Tensor part = values.narrow(0, done, n);
    if (!direct) {
      if (!buffer_.defined()) buffer_ = at::empty({kWriteElements * 4}, at::kByte);
      part = buffer_.narrow(0, 0, n * width).view(dtype).copy_(part);
    }
    open_file(found->second.file)
        .write_at(
            tensor.begin + (begin + done) * width,
            {static_cast<const std::byte*>(part.const_data_ptr()), static_cast<size_t>(n * width)});
  }
  written_bytes_ += values.numel() * width;
}

void CheckpointFiles::finish_writing(int64_t rank) {
  for (std::optional<OutputFile>& file : open_) {
    if (!file) continue;
    file->sync();
    file->close();
    file.reset();
  }
  write_text_file_atomically(staged(written_note(rank)), fmt::format("{}", written_bytes_));
}

// A range that no rank owns, or two do, would be zeros or a race: never a checkpoint.
void CheckpointFiles::check_all_written(int64_t ranks) const {
  int64_t written = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const std::string note = staged(written_note(rank));
    written += std::stoll(read_text_file(note, ExitCode::kDeviceFault));
    fs::remove(note);
  }
  MARROW_CHECK(written == tensor_bytes_, ExitCode::kDeviceFault,
               Fix("this is a defect: the ranks' owned ranges must cover every tensor once"),
               "the ranks wrote {} bytes of the {} of {}", written, tensor_bytes_, folder_);
}

void CheckpointFiles::publish(const std::vector<SideFile>& side_files, int64_t ranks) {
  check_all_written(ranks);
  for (const SideFile& file : side_files) staging_->write_text(file.name, file.text);
  const std::string marker = marker_text(staging_->path());
  // In place of an older checkpoint of the same step the marker comes along with the rename, so
  // that there is no moment without a complete one.
  const bool replaces = fs::exists(folder_);
  if (replaces) staging_->write_text(kCompleteMarker, marker);
  staging_->publish();
  staging_.reset();
  if (!replaces) {
    write_text_file_atomically((fs::path(folder_) / kCompleteMarker).string(), marker);
  }
}

void CheckpointFiles::remove_staging() const {
  std::error_code ignored;
  fs::remove_all(staging_path(folder_), ignored);
}

std::string step_folder(const std::string& dir, int64_t step) {
  return (fs::path(dir) / fmt::format("{}{:08}", kStepPrefix, step)).string();
}

std::vector<std::string> step_folders(const std::string& dir) {
  std::vector<std::pair<int64_t, std::string>> found;
  if (!fs::is_directory(dir)) return {};
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kStepPrefix) || !entry.is_directory()) continue;
    const std::string digits = name.substr(kStepPrefix.size());
    const bool number = !digits.empty() && digits.size() < 18 &&
                        digits.find_first_not_of("0123456789") == std::string::npos;
    if (number) found.emplace_back(std::stoll(digits), entry.path().string());
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> folders;
  for (auto& [step, folder] : found) folders.push_back(std::move(folder));
  return folders;
}

void check_complete(const std::string& folder) {
  const std::string marker = (fs::path(folder) / kCompleteMarker).string();
  MARROW_CHECK(fs::exists(marker), ExitCode::kBadInput,
               Fix("use another checkpoint; this one's save was interrupted"),
               "{} is no complete checkpoint: it has no file {}", folder, kCompleteMarker);
  for (const auto& [name, size] : Json::read_file(marker).at("files").items()) {
    const fs::path path = fs::path(folder) / name;
    MARROW_CHECK(fs::exists(path), ExitCode::kBadInput,
                 Fix("use another checkpoint; this one is damaged"),
                 "checkpoint {} is damaged: file {} is missing", folder, name);
    const int64_t actual = static_cast<int64_t>(fs::file_size(path));
    MARROW_CHECK(actual == size.as_int(), ExitCode::kBadInput,
                 Fix("use another checkpoint; this one is damaged"),
                 "checkpoint {} is damaged: {} has {} bytes, but was saved with {}", folder, name,
                 actual, size.as_int());
  }
}

void remove_old_checkpoints(const std::string& dir, int64_t keep, const std::string& saved) {
  int64_t complete = 1;  // `saved`, which counts even where folders of higher steps exist
  for (const std::string& folder : step_folders(dir)) {
    if (file_name(folder) == file_name(saved)) continue;
    const bool unmarked = !fs::exists(fs::path(folder) / kCompleteMarker);
    const bool surplus = keep > 0 && complete >= keep;
    if (unmarked || surplus) {
      remove_checkpoint(folder);
    } else if (is_complete(folder)) {
      ++complete;
    }
  }
}

void remove_stale_staging(const std::string& dir) {
  if (!fs::is_directory(dir)) return;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(fmt::format(".{}", kStepPrefix)) && name.ends_with(".tmp")) {
      std::error_code ignored;
      fs::remove_all(entry.path(), ignored);
    }
  }
}

}  // namespace marrow
