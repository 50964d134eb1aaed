#include "train/checkpoint_files.h"

#include <atomic>
#include <cinttypes>
#include <cstring>
#include <filesystem>
#include <thread>

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kWriteElements = int64_t{1} << 26, kCheckBytes = int64_t{1} << 24;
constexpr const char* kReadyNote = "ready";
constexpr int64_t kFormat = 3;

std::string written_note(int64_t rank) { return fmt::format("rank-{:05}.written", rank); }

// Appears whole, but need not survive a power cut: no folder is flushed, which may be renamed at any moment.
void leave_note(const std::string& path, const JsonWriter& note) {
  OutputFile file(path + ".tmp");
  file.append(note.text());
  file.close();
  fs::rename(path + ".tmp", path);
}

// The note at `path`, once it is one of this save.
Json wait_for_note(const std::string& path, const std::string& save, double timeout_seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, std::chrono::milliseconds(100))) {
    try {
      if (fs::exists(path)) {
        const Json note = Json::read_file(path);
        if (note.at("save").as_string() == save) return note;
      }
    } catch (const Error&) {  // an older one, removed while it was read
    }
    MARROW_CHECK(
        std::chrono::steady_clock::now() < deadline, ExitCode::kDeviceFault,
        Fix("see the other ranks' logs, and check that checkpoint.dir is on a file system that all ranks share"),
        "waited {} s in vain for {} of save {}", timeout_seconds, path, save);
    std::this_thread::sleep_for(pause);
  }
}

// Odd, and unlike for words that are near each other.
uint32_t weight_of(uint64_t word) {
  const uint32_t mixed = static_cast<uint32_t>(word) * 0x9E3779B1u ^ static_cast<uint32_t>(word >> 32) * 0x85EBCA77u;
  return (mixed ^ mixed >> 15) | 1u;
}

bool is_complete(const std::string& folder) try {
  check_complete(folder);
  return true;
} catch (const Error&) {
  return false;
}

}  // namespace

std::vector<CheckpointTensor> checkpoint_tensors(const MoeModel& model, OptimizerName optimizer) {
  std::vector<CheckpointTensor> tensors;
  for (const ParameterSpec& spec : all_parameter_specs(model)) {
    const bool muon = optimizer == OptimizerName::kMuon && spec.rule == UpdateRule::kMuon;
    for (const HubTensor& part : spec.parts) tensors.push_back({part, true, !muon});
  }
  for (const HubTensor& bias : model.shape().selection_biases) tensors.push_back({bias, false, false});
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
    if (entry.exp_avg_sq) states.push_back({{tensor.name + ".exp_avg_sq", tensor.shape}, state_dtype});
  }
  layouts_ = layout_shards("model", masters, max_shard_bytes);
  for (auto& layout : layout_shards("optimizer", states, max_shard_bytes)) layouts_.push_back(std::move(layout));
  checksums_.resize(layouts_.size());
  for (size_t i = 0; i < layouts_.size(); ++i) {
    for (const StoredTensor& tensor : layouts_[i].tensors) {
      places_.emplace(tensor.name, std::pair(i, &tensor));
      tensor_bytes_ += tensor.end - tensor.begin;
    }
  }
}

void CheckpointFiles::open(int64_t rank, const std::string& save, double timeout_seconds) {
  save_ = save;
  rank_ = rank;
  if (rank != 0) {
    wait_for_note(staged(kReadyNote), save, timeout_seconds);
    return;
  }
  staging_.emplace(folder_, tensor_bytes_);
  for (size_t i = 0; i < layouts_.size(); ++i) {
    const SafetensorsLayout& layout = layouts_[i];
    OutputFile file(staged(layout.file_name));
    file.append(layout.header);
    file.truncate_to(layout.file_bytes);
    file.close();
    checksums_[i] += range_checksum(std::as_bytes(std::span(layout.header)), 0);
  }
  leave_note(staged(kReadyNote), JsonWriter().field("save", save));
}

void CheckpointFiles::write(const std::string& name, int64_t begin, const at::Tensor& values) {
  const auto found = places_.find(name);
  MARROW_CHECK(found != places_.end(), ExitCode::kUsage, Fix("this is a defect: list the tensor in checkpoint_tensors"),
               "the checkpoint has no place for {}", name);
  const auto& [file, tensor] = found->second;
  MARROW_CHECK(values.dim() == 1 && begin >= 0 && begin + values.numel() <= tensor->elements() &&
                   values.scalar_type() == tensor->dtype,
               ExitCode::kUsage, Fix("this is a defect: check the owned ranges and their dtypes"),
               "{} {} at element {} does not fit {} {} {}", at::toString(values.scalar_type()),
               shape_text(values.sizes()), begin, name, dtype_name(tensor->dtype), shape_text(tensor->shape));
  const int64_t width = static_cast<int64_t>(at::elementSize(tensor->dtype));
  OutputFile& output = open_.try_emplace(file, staged(layouts_[file].file_name), /*existing=*/true).first->second;
  for (int64_t done = 0; done < values.numel(); done += kWriteElements) {
    const int64_t n = std::min(kWriteElements, values.numel() - done);
    const at::Tensor part = values.narrow(0, done, n).cpu().contiguous();
    const std::span bytes(static_cast<const std::byte*>(part.const_data_ptr()), part.nbytes());
    const int64_t offset = tensor->begin + (begin + done) * width;
    output.write_at(offset, bytes);
    checksums_[file] += range_checksum(bytes, offset);
  }
  written_bytes_ += values.numel() * width;
}

void CheckpointFiles::finish_writing() {
  for (auto& [index, file] : open_) {
    file.sync();
    file.close();
  }
  open_.clear();
  leave_note(staged(written_note(rank_)),
             JsonWriter().field("save", save_, "bytes", written_bytes_, "checksums",
                                std::vector<int64_t>(checksums_.begin(), checksums_.end())));
}

// A range that no rank owns, or two do, would be zeros or a race: never a checkpoint.
void CheckpointFiles::gather_notes(int64_t ranks, double timeout_seconds) {
  int64_t written = 0;
  std::ranges::fill(checksums_, 0);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Json note = wait_for_note(staged(written_note(rank)), save_, timeout_seconds);
    written += note.at("bytes").as_int();
    for (size_t i = 0; i < checksums_.size(); ++i)
      checksums_[i] += static_cast<uint64_t>(note.at("checksums").at(i).as_int());
    fs::remove(staged(written_note(rank)));
  }
  fs::remove(staged(kReadyNote));
  MARROW_CHECK(written == tensor_bytes_, ExitCode::kDeviceFault,
               Fix("this is a defect: the ranks' owned ranges must cover every tensor once"),
               "the ranks wrote {} bytes of the {} of {}", written, tensor_bytes_, folder_);
}

void CheckpointFiles::publish(const std::vector<SideFile>& side_files, int64_t ranks, double timeout_seconds) {
  gather_notes(ranks, timeout_seconds);
  JsonWriter files;
  const auto list = [&](const std::string& name, int64_t bytes, uint64_t checksum) {
    files.raw(name, JsonWriter().field("bytes", bytes, "checksum", static_cast<int64_t>(checksum)).text());
  };
  for (size_t i = 0; i < layouts_.size(); ++i) list(layouts_[i].file_name, layouts_[i].file_bytes, checksums_[i]);
  for (const SideFile& file : side_files) {
    staging_->write_text(file.name, file.text);
    list(file.name, static_cast<int64_t>(file.text.size()), range_checksum(std::as_bytes(std::span(file.text)), 0));
  }
  const std::string marker = JsonWriter().field("format", kFormat).raw("files", files.text()).text() + "\n";
  // In place of an older checkpoint of the same step the marker comes along with the rename, so
  // that there is no moment without a complete one.
  const bool replaces = fs::exists(folder_);
  if (replaces) staging_->write_text(kCompleteMarker, marker);
  staging_->publish();
  staging_.reset();
  if (!replaces) write_text_file_atomically(folder_ + "/" + kCompleteMarker, marker);
}

std::string step_folder(const std::string& dir, int64_t step) {
  return (fs::path(dir) / fmt::format("step-{:08}", step)).string();
}

std::vector<std::string> step_folders(const std::string& dir) {
  std::map<int64_t, std::string, std::greater<>> found;
  if (!fs::is_directory(dir)) return {};
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    int64_t step = 0;
    if (std::sscanf(name.c_str(), "step-%" SCNd64, &step) != 1) continue;
    if (step_folder(dir, step) == entry.path()) found.emplace(step, entry.path());
  }
  std::vector<std::string> folders;
  for (auto& [step, folder] : found) folders.push_back(std::move(folder));
  return folders;
}

void check_complete(const std::string& folder) {
  const std::string marker = (fs::path(folder) / kCompleteMarker).string();
  std::error_code unread;  // what cannot be looked at is no file of ours either
  MARROW_CHECK(fs::is_regular_file(marker, unread), ExitCode::kBadInput,
               Fix("use another checkpoint; this one's save was interrupted"),
               "{} is no complete checkpoint: it has no file {}", folder, kCompleteMarker);
  const Json text = Json::read_file(marker);
  const int64_t format = text.at("format").as_int();
  MARROW_CHECK(format == kFormat, ExitCode::kBadInput,
               Fix("marrow export by the version that saved it, marrow import by this one (keeps the weights alone)"),
               "{}: format {}, this version of marrow reads {}", marker, format, kFormat);
  for (const auto& [name, file] : text.at("files").items()) {
    const fs::path path = fs::path(folder) / name;
    const bool is_file = fs::is_regular_file(path, unread);
    const int64_t actual = is_file ? static_cast<int64_t>(fs::file_size(path, unread)) : 0;
    const int64_t saved = file.at("bytes").as_int();
    MARROW_CHECK(is_file && actual == saved, ExitCode::kBadInput, Fix("use another checkpoint; this one is damaged"),
                 "checkpoint {} is damaged: {} has {} bytes, but {} says {}", folder, name, actual, kCompleteMarker,
                 saved);
  }
}

void check_contents(const std::string& folder, const ContentCheck& check) {
  int64_t index = 0;
  for (const auto& [name, file] : Json::read_file(folder + "/" + kCompleteMarker).at("files").items()) {
    if (index++ % check.ranks != check.rank || (!check.optimizer && name.starts_with("optimizer-"))) continue;
    const MappedFile mapped(folder + "/" + name);
    const int64_t size = static_cast<int64_t>(mapped.bytes().size());
    std::atomic<uint64_t> sum = 0;
    at::parallel_for(0, (size + kCheckBytes - 1) / kCheckBytes, 1, [&](int64_t first, int64_t last) {
      const int64_t begin = first * kCheckBytes, end = std::min(last * kCheckBytes, size);
      sum += range_checksum(mapped.bytes().subspan(begin, end - begin), begin);
    });
    const uint64_t saved = static_cast<uint64_t>(file.at("checksum").as_int());
    MARROW_CHECK(
        sum == saved, ExitCode::kBadInput, Fix("use another checkpoint; this one is damaged"),
        "checkpoint {} is damaged: the contents of {} are not those that were saved (checksum {:x}, saved {:x})",
        folder, name, sum.load(), saved);
  }
}

uint64_t range_checksum(std::span<const std::byte> bytes, int64_t offset) {
  const uint64_t first = static_cast<uint64_t>(offset);
  size_t i = 0;
  uint64_t sum = 0;
  const auto add_byte = [&] {  // the other bytes of its word count as zeros
    sum += (uint64_t{static_cast<uint8_t>(bytes[i])} << 8 * ((first + i) % 4)) * weight_of((first + i) / 4);
    ++i;
  };
  while (i < bytes.size() && (first + i) % 4 != 0) add_byte();
  const uint64_t first_word = (first + i) / 4, words = (bytes.size() - i) / 4;
  for (uint64_t w = 0; w < words; ++w, i += 4) {
    uint32_t word = 0;
    std::memcpy(&word, bytes.data() + i, 4);
    sum += uint64_t{word} * weight_of(first_word + w);
  }
  while (i < bytes.size()) add_byte();
  return sum;
}

void remove_old_checkpoints(const std::string& dir, int64_t keep, const std::string& saved) {
  int64_t complete = 1;  // `saved`, which counts even where folders of higher steps exist
  for (const std::string& folder : step_folders(dir)) {
    if (fs::path(folder).filename() == fs::path(saved).filename()) continue;
    const bool surplus = keep > 0 && complete >= keep;
    if (surplus || !fs::exists(fs::path(folder) / kCompleteMarker)) {
      std::error_code ignored;  // hidden first, so that a kill half-way leaves no damaged checkpoint behind
      fs::rename(folder, staging_path(folder), ignored);
      fs::remove_all(staging_path(folder), ignored);
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
    if (name.starts_with(".step-") && name.ends_with(temporary_path(""))) fs::remove_all(entry.path(), ignored);
  }
}

}  // namespace marrow
