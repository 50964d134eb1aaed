// A folder that appears whole or not at all.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace marrow {

// Where the contents of `folder` are written before they are complete: its sibling ".NAME.tmp".
std::string staging_path(const std::string& folder);

// The staging folder of `folder`, empty, made anew over any left by a process that was killed.
// Removed by the destructor unless it was published. Errors (kDeviceFault) where the disk has not
// `bytes_wanted` free, naming both numbers.
class StagedFolder {
 public:
  StagedFolder(const std::string& folder, int64_t bytes_wanted);
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  const std::string& path() const { return path_; }
  void write_text(const std::string& name, std::string_view text) const;
  // Flushes the folder and renames it to its place. What was there before is exchanged for it in
  // one step, then removed.
  void publish();

 private:
  std::string folder_, path_;
  bool published_ = false;
};

// Errors (kUsage) if `folder` exists and is not an empty folder: nothing is written over.
void check_output_is_new(const std::string& folder, std::string_view flag);

// Bytes that an unprivileged process can still write where `path` is or will be.
int64_t free_disk_bytes(const std::string& path);

}  // namespace marrow
