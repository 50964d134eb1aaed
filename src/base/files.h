// Files and folders: mapping, whole reads, writes that appear whole or not at all.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace marrow {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using FileHandle = std::unique_ptr<std::FILE, CloseFile>;

// A small file that goes along with others, whole.
struct SideFile {
  std::string name;  // "tokenizer.json"
  std::string text;
};

// The whole file as text. A missing file is an error with `code`.
std::string read_text_file(const std::string& path, ExitCode code = ExitCode::kBadInput);

// Where a file is written before it is complete: beside it, under a name that is no user's.
inline std::string temporary_path(const std::string& path) { return path + ".marrow-tmp"; }
// Writes `text` to the temporary path, flushes it and renames it.
void write_text_file_atomically(const std::string& path, std::string_view text);
// From the temporary path to PATH, in a way that survives a power cut.
void rename_temporary(const std::string& path);

// Bytes that an unprivileged process can still write where `path` is or will be.
int64_t free_disk_bytes(const std::string& path);

// Errors (kUsage) if `folder` exists and is not an empty folder: nothing is written over.
void check_output_is_new(const std::string& folder, std::string_view flag);

// A whole file mapped read-only. An empty file gives an empty span.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path, ExitCode code = ExitCode::kBadInput);
  // Error (kBadInput) where the file was truncated since: a signal would end who reads it. Ask before each stretch.
  std::span<const std::byte> bytes() const;
  std::span<const std::byte> unchecked_bytes() const { return mapped_; }  // of files that nobody cuts
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  FileHandle file_;
  std::span<const std::byte> mapped_;
  std::shared_ptr<void> mapping_;  // unmaps
};

// A file open for writing at given offsets (pwrite); an Error names the path, bytes wanted and the disk's free space.
class OutputFile {
 public:
  // Creates the file, or with `existing` opens one without truncating it; what is appended comes behind its bytes.
  explicit OutputFile(const std::string& path, bool existing = false);

  void append(std::span<const std::byte> bytes);
  void append(std::string_view text) { append(std::as_bytes(std::span(text))); }
  void write_at(int64_t offset, std::span<const std::byte> bytes);
  void truncate_to(int64_t size);
  void sync();   // fsync
  void close();  // reports what the destructor would have to swallow

 private:
  void check(bool done, std::string_view what) const;
  std::string path_;
  FileHandle file_;
  int64_t position_ = 0;
};

// Where the contents of `folder` are written before they are complete: its sibling ".NAME.marrow-tmp".
std::string staging_path(const std::string& folder);

// The staging folder of `folder`, empty, made anew over any left by a process that was killed. Removed by the
// destructor unless it was published. Errors (kDeviceFault) where the disk has not `bytes_wanted` free.
class StagedFolder {
 public:
  StagedFolder(const std::string& folder, int64_t bytes_wanted);
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  const std::string& path() const { return path_; }
  void write_text(const std::string& name, std::string_view text) const;
  // Flushes the folder and renames it to its place. What was there is exchanged for it in one step, then removed.
  void publish();

 private:
  std::string folder_, path_;
};

// Holds PATH as this process's own while it lives (flock). Error (kUsage, with `fix`) where another process does.
class FileLock {
 public:
  FileLock(const std::string& path, const Fix& fix);

 private:
  FileHandle file_;
};

}  // namespace marrow
