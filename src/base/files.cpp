#include "base/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace marrow {
namespace fs = std::filesystem;
namespace {

// "a/b" of "a/b/": so that its file name is never empty.
fs::path without_slash(const std::string& path) {
  const fs::path normal = fs::path(path).lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

std::string folder_of(const std::string& path) {
  const std::string parent = without_slash(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

FileHandle open_for_reading(const std::string& path, ExitCode code) {
  MARROW_CHECK(!fs::is_directory(path), code, Fix("give the path of a file"), "cannot read {}: it is a folder", path);
  FileHandle file(std::fopen(path.c_str(), "re"));
  MARROW_CHECK(file || errno != EMFILE, ExitCode::kDeviceFault, Fix("raise the limit of open files: ulimit -n"),
               "cannot open {}: {}", path, std::strerror(EMFILE));
  MARROW_CHECK(file, code, Fix("check that the path exists and can be read"), "cannot open {}: {}", path,
               std::strerror(errno));
  return file;
}

int64_t size_of(const FileHandle& file) {
  struct stat status {};
  return fstat(fileno(file.get()), &status) == 0 ? status.st_size : -1;
}

// Writes a file that is on the disk once this returns.
void write_and_sync(const std::string& path, std::string_view text) {
  OutputFile file(path);
  file.append(text);
  file.sync();
  file.close();
}

// Flushes a folder's entries to disk, so that a rename in it survives a power cut.
void fsync_folder(const std::string& folder) {
  const FileHandle file(std::fopen(folder.c_str(), "re"));
  MARROW_CHECK(file && fsync(fileno(file.get())) == 0, ExitCode::kDeviceFault,
               Fix("check that the folder exists, and the disk"), "cannot flush folder {}: {}", folder,
               std::strerror(errno));
}

}  // namespace

std::string read_text_file(const std::string& path, ExitCode code) {
  const FileHandle file = open_for_reading(path, code);
  std::string text;
  char buffer[1 << 16];
  while (const size_t got = std::fread(buffer, 1, sizeof buffer, file.get())) text.append(buffer, got);
  MARROW_CHECK(std::ferror(file.get()) == 0, code, Fix("check the disk"), "cannot read {}: {}", path,
               std::strerror(errno));
  return text;
}

void write_text_file_atomically(const std::string& path, std::string_view text) {
  write_and_sync(temporary_path(path), text);
  rename_temporary(path);
}

void rename_temporary(const std::string& path) {
  MARROW_CHECK(std::rename(temporary_path(path).c_str(), path.c_str()) == 0, ExitCode::kDeviceFault,
               Fix("check the folder's permissions"), "cannot rename {} to {}: {}", temporary_path(path), path,
               std::strerror(errno));
  fsync_folder(folder_of(path));
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
  MARROW_CHECK(is_new, ExitCode::kUsage, Fix("give another path to {}, or remove this one", flag),
               "{} exists already; nothing was written", folder);
}

MappedFile::MappedFile(const std::string& path, ExitCode code) : path_(path) {
  MARROW_CHECK(!fs::is_fifo(path), code, Fix("give the path of a file"), "cannot map {}: it is a pipe", path);
  file_ = open_for_reading(path, code);
  const auto size = static_cast<size_t>(std::max<int64_t>(0, size_of(file_)));
  void* const mapped = size == 0 ? nullptr : mmap(nullptr, size, PROT_READ, MAP_SHARED, fileno(file_.get()), 0);
  MARROW_CHECK(mapped != MAP_FAILED, code, Fix("check the free address space and the file system"),
               "cannot map {} ({} bytes): {}", path, size, std::strerror(errno));
  mapped_ = {static_cast<const std::byte*>(mapped), size};
  if (size > 0) mapping_.reset(mapped, [size](void* begin) { munmap(begin, size); });
}

std::span<const std::byte> MappedFile::bytes() const {
  const int64_t now = size_of(file_);
  MARROW_CHECK(now >= static_cast<int64_t>(mapped_.size()), ExitCode::kBadInput,
               Fix("restore {} (copy or make it again) and start again; leave the files of a run as they are", path_),
               "{} was cut from {} to {} bytes while it was in use", path_, mapped_.size(), now);
  return mapped_;
}

OutputFile::OutputFile(const std::string& path, bool existing)
    : path_(path), file_(std::fopen(path.c_str(), existing ? "r+e" : "we")) {
  MARROW_CHECK(file_, ExitCode::kDeviceFault, Fix("check that the folder exists and can be written"),
               "cannot create {}: {}", path, std::strerror(errno));
  position_ = size_of(file_);
}

void OutputFile::check(bool done, std::string_view what) const {
  MARROW_CHECK(done, ExitCode::kDeviceFault,
               Fix("free space on this disk (or raise its quota), or write to another folder"),
               "cannot {} {}: {} ({} bytes free)", what, path_, std::strerror(errno), free_disk_bytes(path_));
}

void OutputFile::append(std::span<const std::byte> bytes) {
  write_at(position_, bytes);
  position_ += static_cast<int64_t>(bytes.size());
}

void OutputFile::write_at(int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = pwrite(fileno(file_.get()), bytes.data(), bytes.size(), offset);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) check(false, fmt::format("write {} bytes at {} of", bytes.size(), offset));
    bytes = bytes.subspan(static_cast<size_t>(wrote));
    offset += wrote;
  }
}

void OutputFile::truncate_to(int64_t size) {
  check(ftruncate(fileno(file_.get()), size) == 0, fmt::format("make {} bytes of", size));
}

void OutputFile::sync() { check(fsync(fileno(file_.get())) == 0, "flush"); }

void OutputFile::close() { check(std::fclose(file_.release()) == 0, "close"); }

std::string staging_path(const std::string& folder) {
  return temporary_path(folder_of(folder) + "/." + without_slash(folder).filename().string());
}

StagedFolder::StagedFolder(const std::string& folder, int64_t bytes_wanted)
    : folder_(without_slash(folder).string()), path_(staging_path(folder)) {
  std::error_code error;
  fs::remove_all(path_, error);
  const int64_t free = free_disk_bytes(path_);
  MARROW_CHECK(bytes_wanted <= free, ExitCode::kDeviceFault, Fix("free space on this disk, or write to another folder"),
               "{} needs {} bytes, but only {} are free on its disk", folder_, bytes_wanted, free);
  fs::create_directories(path_, error);
  MARROW_CHECK(!error, ExitCode::kDeviceFault, Fix("check the parent folder's permissions"),
               "cannot create folder {}: {}", path_, error.message());
}

StagedFolder::~StagedFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void StagedFolder::write_text(const std::string& name, std::string_view text) const {
  write_and_sync(path_ + "/" + name, text);
}

void StagedFolder::publish() {
  fsync_folder(path_);
  bool done = std::rename(path_.c_str(), folder_.c_str()) == 0;
  if (!done && (errno == ENOTEMPTY || errno == EEXIST)) {  // what was there ends up in path_
    done = renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, folder_.c_str(), RENAME_EXCHANGE) == 0;
  }
  MARROW_CHECK(done, ExitCode::kDeviceFault, Fix("remove the folder, or check its permissions"),
               "cannot rename {} to {}: {}", path_, folder_, std::strerror(errno));
  fsync_folder(folder_of(folder_));
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

FileLock::FileLock(const std::string& path, const Fix& fix) : file_(std::fopen(path.c_str(), "ae")) {
  MARROW_CHECK(file_, ExitCode::kDeviceFault, Fix("check that the folder exists and can be written"),
               "cannot create {}: {}", path, std::strerror(errno));
  // Some file systems have no locks.
  MARROW_CHECK(flock(fileno(file_.get()), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, ExitCode::kUsage, fix,
               "another run holds {}", path);
}

}  // namespace marrow
