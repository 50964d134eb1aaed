// The writing half of indexed_corpus.h.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/json.h"
#include "data/indexed_corpus.h"

namespace marrow {
namespace fs = std::filesystem;

uint8_t corpus_dtype_code(int64_t vocab_size) { return vocab_size <= 65536 ? 8 : 4; }

CorpusWriter::CorpusWriter(std::string prefix, CorpusInfo info, bool overwrite)
    : prefix_(std::move(prefix)), info_(std::move(info)), width_(corpus_dtype_code(info_.vocab_size) == 8 ? 2 : 4) {
  const fs::path folder = fs::path(prefix_).parent_path();
  MARROW_CHECK(!fs::path(prefix_).filename().empty(), ExitCode::kUsage,
               Fix("give --output a file name prefix, such as data/corpus"), "output prefix \"{}\" names no file",
               prefix_);
  std::error_code error;
  if (!folder.empty()) fs::create_directories(folder, error);
  MARROW_CHECK(!error, ExitCode::kUsage, Fix("choose another --output"), "cannot create folder {}: {}", folder.string(),
               error.message());
  for (const char* suffix : {".idx", ".bin", ".json"}) {
    MARROW_CHECK(overwrite || !fs::exists(prefix_ + suffix), ExitCode::kUsage,
                 Fix("add --overwrite to replace it, or choose another --output"), "output {}{} exists already",
                 prefix_, suffix);
  }
  lock_.emplace(prefix_ + ".bin.tmp", Fix("wait for the other run, or choose another --output"));
  bin_.emplace(prefix_ + ".bin.tmp");
  idx_.emplace(prefix_ + ".idx.tmp");
  idx_->append(std::string(kIndexHeaderBytes, '\0'));  // finish() fills it in
}

CorpusWriter::~CorpusWriter() {
  if (!lock_) return;  // finished, or never begun
  std::remove((prefix_ + ".idx.tmp").c_str());
  std::remove((prefix_ + ".bin.tmp").c_str());
}

void CorpusWriter::append(std::span<const int32_t> ids, std::span<const int32_t> lengths) {
  int32_t lowest = 0, highest = 0;
  for (const int32_t id : ids) {
    lowest = std::min(lowest, id);
    highest = std::max(highest, id);
  }
  MARROW_CHECK(lowest >= 0 && highest < info_.vocab_size, ExitCode::kDeviceFault,
               Fix("report this tokenizer.json: its ids do not fit its vocabulary"),
               "tokenizer {} gave ids in [{}, {}], its vocabulary has {}", info_.tokenizer, lowest, highest,
               info_.vocab_size);
  const std::vector<uint16_t> narrow(ids.begin(), width_ == 2 ? ids.end() : ids.begin());
  const std::span<const std::byte> tokens = width_ == 2 ? std::as_bytes(std::span(narrow)) : std::as_bytes(ids);
  checksum_ = crc32(checksum_, tokens);
  bin_->append(tokens);
  idx_->append(std::as_bytes(lengths));
  documents_ += static_cast<int64_t>(lengths.size());
  tokens_ += static_cast<int64_t>(ids.size());
}

// Offsets and document indices follow from the lengths, which are read back from the file.
void CorpusWriter::write_index_tail() {
  const MappedFile lengths(prefix_ + ".idx.tmp");
  std::vector<int64_t> buffer;
  const auto flush = [&] {
    idx_->append(std::as_bytes(std::span(buffer)));
    buffer.clear();
  };
  const auto put = [&](int64_t value) {
    buffer.push_back(value);
    if (buffer.size() == size_t{1} << 19) flush();
  };
  int64_t offset = 0;
  for (int64_t i = 0; i < documents_; ++i) {
    int32_t length = 0;
    std::memcpy(&length, lengths.bytes().data() + kIndexHeaderBytes + i * 4, 4);
    put(offset);
    offset += length * width_;
  }
  for (int64_t i = 0; i <= documents_; ++i) put(i);
  flush();
  IndexHeader header{.dtype_code = corpus_dtype_code(info_.vocab_size),
                     .sequences = static_cast<uint64_t>(documents_),
                     .document_indices = static_cast<uint64_t>(documents_ + 1)};
  kIndexMagic.copy(header.magic, kIndexMagic.size());
  idx_->write_at(0, std::as_bytes(std::span(&header, 1)));
}

void CorpusWriter::finish() {
  write_index_tail();
  for (auto* output : {&*bin_, &*idx_}) {
    output->sync();
    output->close();
  }
  JsonWriter json;
  json.field("tokenizer", info_.tokenizer, "tokenizer_hash", info_.tokenizer_hash, "vocab_size", info_.vocab_size);
  json.raw("end_of_document", info_.end_of_document ? json_text(*info_.end_of_document) : "null");
  json.field("documents", documents_, "tokens", tokens_, "bin_crc32", checksum_);
  // Without an index the old files are no corpus any more, so a kill in between leaves no mixture.
  std::remove((prefix_ + ".idx").c_str());
  write_text_file_atomically(prefix_ + ".json", json.text() + "\n");
  for (const std::string& path : {prefix_ + ".bin", prefix_ + ".idx"}) {
    MARROW_CHECK(std::rename((path + ".tmp").c_str(), path.c_str()) == 0, ExitCode::kDeviceFault,
                 Fix("check the folder's permissions"), "cannot rename {0}.tmp to {0}: {1}", path,
                 std::strerror(errno));
  }
  const std::string folder = fs::path(prefix_).parent_path().string();
  fsync_folder(folder.empty() ? "." : folder);
  lock_.reset();
}

}  // namespace marrow
