#include "train/checkpoint_files.h"

#include <cinttypes>
#include <filesystem>

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kWriteElements = int64_t{1} << 26;

std::string written_note(int64_t rank) { return fmt::format("rank-{:05}.written", rank); }

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

std::vector<CheckpointTensor> checkpoint_tensors(const std::vector<ParameterSpec>& specs, OptimizerName optimizer) {
  std::vector<CheckpointTensor> tensors;
  for (const ParameterSpec& spec : specs) {
    const bool muon = optimizer == OptimizerName::kMuon && spec.rule == UpdateRule::kMuon;
    for (const HubTensor& part : spec.parts) tensors.push_back({part, true, !muon});
  }
  return tensors;
}

CheckpointFiles::CheckpointFiles(std::string folder, const std::vector<CheckpointTensor>& tensors,
                                 at::ScalarType state_dtype, int64_t max_shard_bytes)
    : folder_(std::move(folder)) {
  std::vector<StoredTensor> masters, states;
  for (const CheckpointTensor& entry : tensors) {
    const HubTensor& tensor = entry.tensor;
    masters.push_back({tensor, at::kFloat});
    if (entry.exp_avg) states.push_back({{tensor.name + ".exp_avg", tensor.shape}, state_dtype});
    if (entry.exp_avg_sq) {
      states.push_back({{tensor.name + ".exp_avg_sq", tensor.shape}, state_dtype});
    }
  }
  layouts_ = layout_shards("model", masters, max_shard_bytes);
  for (auto& layout : layout_shards("optimizer", states, max_shard_bytes)) {
    layouts_.push_back(std::move(layout));
  }
  for (size_t i = 0; i < layouts_.size(); ++i) {
    for (const StoredTensor& tensor : layouts_[i].tensors) {
      places_.emplace(tensor.name, Place{i, &tensor});
      tensor_bytes_ += tensor.end - tensor.begin;
    }
  }
}

void CheckpointFiles::create() {
  staging_.emplace(folder_, tensor_bytes_);
  for (const SafetensorsLayout& layout : layouts_) {
    OutputFile file(staged(layout.file_name));
    file.append(layout.header);
    file.truncate_to(layout.file_bytes);
    file.close();
  }
}

void CheckpointFiles::write(const std::string& name, int64_t begin, const at::Tensor& values) {
  const auto found = places_.find(name);
  MARROW_CHECK(found != places_.end(), ExitCode::kUsage, Fix("this is a defect: list the tensor in checkpoint_tensors"),
               "the checkpoint has no place for {}", name);
  const auto& [file, tensor] = found->second;
  MARROW_CHECK(values.dim() == 1 && begin >= 0 && begin + values.numel() <= tensor->elements() &&
                   values.scalar_type() == tensor->dtype,
               ExitCode::kUsage, Fix("this is a defect: check the owned ranges and their dtypes"),
               "{} at element {} does not fit {} {} {}",
               fmt::format("{} {}", at::toString(values.scalar_type()), shape_text(values.sizes())), begin, name,
               dtype_name(tensor->dtype), shape_text(tensor->shape));
  const int64_t width = static_cast<int64_t>(at::elementSize(tensor->dtype));
  OutputFile& output = open_.try_emplace(file, staged(layouts_[file].file_name), /*existing=*/true).first->second;
  for (int64_t done = 0; done < values.numel(); done += kWriteElements) {
    const int64_t n = std::min(kWriteElements, values.numel() - done);
    const at::Tensor part = values.narrow(0, done, n).cpu().contiguous();
    output.write_at(tensor->begin + (begin + done) * width,
                    {static_cast<const std::byte*>(part.const_data_ptr()), part.nbytes()});
  }
  written_bytes_ += values.numel() * width;
}

void CheckpointFiles::finish_writing(int64_t rank) {
  for (auto& [index, file] : open_) {
    file.sync();
    file.close();
  }
  open_.clear();
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
    write_text_file_atomically(folder_ + "/" + kCompleteMarker, marker);
  }
}

std::string step_folder(const std::string& dir, int64_t step) {
  return (fs::path(dir) / fmt::format("step-{:08}", step)).string();
}

std::vector<std::string> step_folders(const std::string& dir) {
  std::vector<std::pair<int64_t, std::string>> found;
  if (!fs::is_directory(dir)) return {};
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    int64_t step = 0;
    if (std::sscanf(name.c_str(), "step-%" SCNd64, &step) != 1) continue;
    if (step_folder(dir, step) == entry.path()) found.emplace_back(step, entry.path());
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> folders;
  for (auto& [step, folder] : found) folders.push_back(std::move(folder));
  return folders;
}

void check_complete(const std::string& folder) {
  const std::string marker = (fs::path(folder) / kCompleteMarker).string();
  MARROW_CHECK(fs::exists(marker), ExitCode::kBadInput, Fix("use another checkpoint; this one's save was interrupted"),
               "{} is no complete checkpoint: it has no file {}", folder, kCompleteMarker);
  for (const auto& [name, size] : Json::read_file(marker).at("files").items()) {
    const fs::path path = fs::path(folder) / name;
    const int64_t actual = fs::exists(path) ? static_cast<int64_t>(fs::file_size(path)) : 0;
    MARROW_CHECK(fs::exists(path) && actual == size.as_int(), ExitCode::kBadInput,
                 Fix("use another checkpoint; this one is damaged"),
                 "checkpoint {} is damaged: {} has {} bytes, but was saved with {}", folder, name, actual,
                 size.as_int());
  }
}

void remove_old_checkpoints(const std::string& dir, int64_t keep, const std::string& saved) {
  int64_t complete = 1;  // `saved`, which counts even where folders of higher steps exist
  for (const std::string& folder : step_folders(dir)) {
    if (fs::path(folder).filename() == fs::path(saved).filename()) continue;
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
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    const bool staging = name.starts_with(".step-") && name.ends_with(".tmp");
    if (staging) fs::remove_all(entry.path(), ignored);
  }
}

}  // namespace marrow
