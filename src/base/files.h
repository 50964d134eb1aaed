// Files: mapping, whole reads, writes that appear whole or not at all.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace marrow {

// The whole file as text. A missing file is an error with `code`.
std::string read_text_file(const std::string& path, ExitCode code = ExitCode::kBadInput);

// Writes `text` to PATH.tmp, fsyncs, renames over PATH and fsyncs the folder.
void write_text_file_atomically(const std::string& path, std::string_view text);

// Flushes a folder's entries to disk, so that a rename in it survives a power cut.
void fsync_folder(const std::string& folder);

// A whole file mapped read-only. An empty file gives an empty span.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path, ExitCode code = ExitCode::kBadInput);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// A file open for writing at given offsets (pwrite); every short write and errno is an Error that
// names the path, the bytes wanted and the space left on the disk.
class OutputFile {
 public:
  // Creates the file, or with `existing` opens one without truncating it.
  explicit OutputFile(const std::string& path, bool existing = false);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  OutputFile& operator=(OutputFile&&) = delete;

  void append(std::span<const std::byte> bytes);
  void write_at(int64_t offset, std::span<const std::byte> bytes);
  void truncate_to(int64_t size);
  int64_t size() const { return position_; }  // bytes appended so far
  void sync();   // fsync
  void close();  // reports what the destructor would have to swallow

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t position_ = 0;
};

}  // namespace marrow
