#include "base/staged_folder.h"

#include <fcntl.h>
#include <stdio.h>  // renameat2

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/files.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

// "a/b" of "a/b/": so that its file name is never empty.
fs::path without_slash(const std::string& folder) {
  fs::path path = fs::path(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  return path;
}

std::string parent_of(const std::string& folder) {
  const std::string parent = without_slash(folder).parent_path().string();
  return parent.empty() ? "." : parent;
}

// Puts `staged` where `folder` is, or is to be. What was in `folder` ends up in `staged`.
void put_in_place(const std::string& staged, const std::string& folder) {
  if (std::rename(staged.c_str(), folder.c_str()) == 0) return;
  const bool occupied = errno == ENOTEMPTY || errno == EEXIST;
  MARROW_CHECK(occupied && renameat2(AT_FDCWD, staged.c_str(), AT_FDCWD, folder.c_str(),
                                     RENAME_EXCHANGE) == 0,
               ExitCode::kDeviceFault, Fix("remove the folder, or check its permissions"),
               "cannot rename {} to {}: {}", staged, folder, std::strerror(errno));
}

}  // namespace

std::string staging_path(const std::string& folder) {
  const fs::path path = without_slash(folder);
  return (fs::path(parent_of(folder)) / ("." + path.filename().string() + ".tmp")).string();
}

int64_t free_disk_bytes(const std::string& path) {
  fs::path existing = fs::absolute(without_slash(path));
  while (!fs::exists(existing) && existing.has_relative_path()) existing = existing.parent_path();
  std::error_code ignored;
  const fs::space_info space = fs::space(existing, ignored);
  return ignored ? INT64_MAX : static_cast<int64_t>(space.available);
}

void check_output_is_new(const std::string& folder, std::string_view flag) {
  const bool is_new = !fs::exists(folder) || (fs::is_directory(folder) && fs::is_empty(folder));
  MARROW_CHECK(is_new, ExitCode::kUsage,
               Fix(fmt::format("give another path to {}, or remove this one", flag)),
               "{} exists already; nothing was written", folder);
}

StagedFolder::StagedFolder(const std::string& folder, int64_t bytes_wanted)
    : folder_(without_slash(folder).string()), path_(staging_path(folder)) {
  std::error_code error;
  fs::remove_all(path_, error);
  const int64_t free = free_disk_bytes(path_);
  MARROW_CHECK(bytes_wanted <= free, ExitCode::kDeviceFault,
               Fix("free space on this disk, or write to another folder"),
               "{} needs {} bytes, but only {} are free on its disk", folder_, bytes_wanted, free);
  fs::create_directories(path_, error);
  MARROW_CHECK(!error, ExitCode::kDeviceFault, Fix("check the parent folder's permissions"),
               "cannot create folder {}: {}", path_, error.message());
}

StagedFolder::~StagedFolder() {
  std::error_code ignored;
  if (!published_) fs::remove_all(path_, ignored);
}

void StagedFolder::write_text(const std::string& name, std::string_view text) const {
  OutputFile file((fs::path(path_) / name).string());
  file.append(std::as_bytes(std::span(text.data(), text.size())));
  file.sync();
  file.close();
}

void StagedFolder::publish() {
  fsync_folder(path_);
  put_in_place(path_, folder_);
  published_ = true;
  fsync_folder(parent_of(folder_));
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace marrow
