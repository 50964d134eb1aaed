// The writing half of indexed_corpus.h.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/json.h"
#include "data/indexed_corpus.h"

namespace marrow {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic{"MMIDIDX\0\0", 9};
constexpr int64_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;
constexpr size_t kFlushBytes = size_t{1} << 22;

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

template <class T>
void append_value(std::vector<std::byte>& out, T value) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof value);
}

void rename_file(const std::string& from, const std::string& to) {
  MARROW_CHECK(std::rename(from.c_str(), to.c_str()) == 0, ExitCode::kDeviceFault,
               Fix("check the folder's permissions"), "cannot rename {} to {}: {}", from, to,
               std::strerror(errno));
}

// Takes the lock that belongs to a file about to be written, creating it.
int lock_file(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  MARROW_CHECK(descriptor >= 0, ExitCode::kDeviceFault,
               Fix("check that the folder exists and can be written"), "cannot create {}: {}", path,
               std::strerror(errno));
  const bool taken = flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
  if (!taken) close(descriptor);
  MARROW_CHECK(taken, ExitCode::kUsage, Fix("wait for the other run, or choose another --output"),
               "another run is writing {}", path);
  return descriptor;
}

}  // namespace

uint8_t corpus_dtype_code(int64_t vocab_size) { return vocab_size <= 65536 ? 8 : 4; }

CorpusWriter::CorpusWriter(std::string prefix, CorpusInfo info, bool overwrite)
    : prefix_(std::move(prefix)),
      info_(std::move(info)),
      overwrite_(overwrite),
      width_(corpus_dtype_code(info_.vocab_size) == 8 ? 2 : 4) {
  const fs::path folder = fs::path(prefix_).parent_path();
  MARROW_CHECK(!fs::path(prefix_).filename().empty(), ExitCode::kUsage,
               Fix("give --output a file name prefix, such as data/corpus"),
               "output prefix \"{}\" names no file", prefix_);
  std::error_code error;
  if (!folder.empty()) fs::create_directories(folder, error);
  MARROW_CHECK(!error, ExitCode::kUsage, Fix("choose another --output"),
               "cannot create folder {}: {}", folder.string(), error.message());
  for (const char* suffix : {".idx", ".bin", ".json"}) {
    MARROW_CHECK(overwrite_ || !fs::exists(prefix_ + suffix), ExitCode::kUsage,
                 Fix("add --overwrite to replace it, or choose another --output"),
                 "output {}{} exists already", prefix_, suffix);
  }
  lock_ = lock_file(prefix_ + ".bin.tmp");
  bin_.emplace(prefix_ + ".bin.tmp");
  idx_.emplace(prefix_ + ".idx.tmp");
  const std::vector<std::byte> header(kHeaderBytes);  // finish() fills it in
  idx_->append(header);
}

CorpusWriter::~CorpusWriter() {
  if (lock_ < 0) return;  // finished, or never begun
  std::remove((prefix_ + ".idx.tmp").c_str());
  std::remove((prefix_ + ".bin.tmp").c_str());
  close(lock_);
}

void CorpusWriter::append(std::span<const int32_t> ids, std::span<const int32_t> lengths) {
  int32_t lowest = 0, highest = 0;
  for (const int32_t id : ids) {
    lowest = std::min(lowest, id);
    highest = std::max(highest, id);
  }
  MARROW_CHECK(lowest >= 0 && highest < info_.vocab_size, ExitCode::kDeviceFault,
               Fix("report this tokenizer.json: its ids do not fit its vocabulary"),
               "tokenizer {} gave ids in [{}, {}], its vocabulary has {}", info_.tokenizer, lowest,
               highest, info_.vocab_size);
  const size_t before = token_buffer_.size();
  token_buffer_.resize(before + ids.size() * static_cast<size_t>(width_));
  std::byte* const out = token_buffer_.data() + before;
  if (width_ == 4) {
    if (!ids.empty()) std::memcpy(out, ids.data(), ids.size_bytes());
  } else {
    auto* const narrow = reinterpret_cast<uint16_t*>(out);  // the buffer holds uint16 only: aligned
    for (size_t i = 0; i < ids.size(); ++i) narrow[i] = static_cast<uint16_t>(ids[i]);
  }
  length_buffer_.insert(length_buffer_.end(), lengths.begin(), lengths.end());
  documents_ += static_cast<int64_t>(lengths.size());
  tokens_ += static_cast<int64_t>(ids.size());
  if (token_buffer_.size() >= kFlushBytes) flush_tokens();
  if (length_buffer_.size() * sizeof(int32_t) >= kFlushBytes) flush_lengths();
}

void CorpusWriter::flush_tokens() {
  bin_->append(token_buffer_);
  token_buffer_.clear();
}

void CorpusWriter::flush_lengths() {
  idx_->append(bytes_of(length_buffer_));
  length_buffer_.clear();
}

// Offsets and document indices follow from the lengths, which are read back from the file.
void CorpusWriter::write_index_tail() {
  constexpr int64_t kChunk = int64_t{1} << 18;
  const MappedFile lengths(prefix_ + ".idx.tmp");
  const std::byte* const first_length = lengths.bytes().data() + kHeaderBytes;
  std::vector<int64_t> values;
  int64_t offset = 0;
  for (int64_t first = 0; first < documents_; first += kChunk) {
    values.clear();
    for (int64_t i = first; i < std::min(documents_, first + kChunk); ++i) {
      int32_t length = 0;
      std::memcpy(&length, first_length + i * 4, 4);
      values.push_back(offset);
      offset += length * width_;
    }
    idx_->append(bytes_of(values));
  }
  for (int64_t first = 0; first <= documents_; first += kChunk) {
    values.clear();
    for (int64_t i = first; i < std::min(documents_ + 1, first + kChunk); ++i) values.push_back(i);
    idx_->append(bytes_of(values));
  }
  std::vector<std::byte> header;
  for (const char c : kMagic) append_value(header, c);
  append_value(header, uint64_t{1});
  append_value(header, corpus_dtype_code(info_.vocab_size));
  append_value(header, static_cast<uint64_t>(documents_));
  append_value(header, static_cast<uint64_t>(documents_ + 1));
  idx_->write_at(0, header);
}

void CorpusWriter::finish() {
  flush_tokens();
  flush_lengths();
  write_index_tail();
  for (auto* file : {&*bin_, &*idx_}) {
    file->sync();
    file->close();
  }
  JsonWriter json;
  json.field("tokenizer", info_.tokenizer).field("tokenizer_hash", info_.tokenizer_hash);
  json.field("vocab_size", info_.vocab_size);
  info_.end_of_document ? json.field("end_of_document", int64_t{*info_.end_of_document})
                        : json.raw("end_of_document", "null");
  json.field("documents", documents_).field("tokens", tokens_);
  // Without an index the old files are no corpus any more, so a kill in between leaves no mixture.
  if (overwrite_) std::remove((prefix_ + ".idx").c_str());
  write_text_file_atomically(prefix_ + ".json", json.text() + "\n");
  rename_file(prefix_ + ".bin.tmp", prefix_ + ".bin");
  rename_file(prefix_ + ".idx.tmp", prefix_ + ".idx");
  const std::string folder = fs::path(prefix_).parent_path().string();
  fsync_folder(folder.empty() ? "." : folder);
  close(std::exchange(lock_, -1));
}

}  // namespace marrow
