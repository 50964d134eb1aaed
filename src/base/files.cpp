#include "base/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace marrow {
namespace {

std::string errno_text() { return std::strerror(errno); }

std::string folder_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

int64_t free_bytes(const std::string& path) {
  struct statvfs status {};
  if (statvfs(folder_of(path).c_str(), &status) != 0) return -1;
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

int open_for_reading(const std::string& path, ExitCode code) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  MARROW_CHECK(descriptor >= 0, code, Fix("check that the path exists and can be read"),
               "cannot open {}: {}", path, errno_text());
  struct stat status {};
  fstat(descriptor, &status);
  if (S_ISDIR(status.st_mode)) {
    close(descriptor);
    MARROW_THROW(code, Fix("give the path of a file"), "cannot read {}: it is a folder", path);
  }
  return descriptor;
}

}  // namespace

std::string read_text_file(const std::string& path, ExitCode code) {
  const int descriptor = open_for_reading(path, code);
  std::string text;
  char buffer[1 << 16];
  ssize_t got = 0;
  while ((got = read(descriptor, buffer, sizeof buffer)) > 0) {
    text.append(buffer, static_cast<size_t>(got));
  }
  close(descriptor);
  MARROW_CHECK(got == 0, code, Fix("check the disk"), "cannot read {}: {}", path, errno_text());
  return text;
}

void write_text_file_atomically(const std::string& path, std::string_view text) {
  const std::string temporary = path + ".tmp";
  OutputFile file(temporary);
  file.append(std::as_bytes(std::span(text.data(), text.size())));
  file.sync();
  file.close();
  MARROW_CHECK(std::rename(temporary.c_str(), path.c_str()) == 0, ExitCode::kDeviceFault,
               Fix("check the folder's permissions"), "cannot rename {} to {}: {}", temporary, path,
               errno_text());
  fsync_folder(folder_of(path));
}

void fsync_folder(const std::string& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  MARROW_CHECK(descriptor >= 0, ExitCode::kDeviceFault, Fix("check that the folder exists"),
               "cannot open folder {}: {}", folder, errno_text());
  const int status = fsync(descriptor);
  close(descriptor);
  MARROW_CHECK(status == 0, ExitCode::kDeviceFault, Fix("check the disk"),
               "cannot flush folder {}: {}", folder, errno_text());
}

MappedFile::MappedFile(const std::string& path, ExitCode code) : path_(path) {
  const int descriptor = open_for_reading(path, code);
  struct stat status {};
  fstat(descriptor, &status);
  size_ = static_cast<size_t>(status.st_size);
  void* mapped = size_ == 0 ? nullptr : mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
  close(descriptor);
  MARROW_CHECK(mapped != MAP_FAILED, code, Fix("check the free address space and the file system"),
               "cannot map {} ({} bytes): {}", path, size_, errno_text());
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

OutputFile::OutputFile(const std::string& path, bool existing) : path_(path) {
  const int flags = existing ? O_WRONLY | O_CLOEXEC : O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
  descriptor_ = open(path.c_str(), flags, 0644);
  MARROW_CHECK(descriptor_ >= 0, ExitCode::kDeviceFault,
               Fix("check that the folder exists and can be written"), "cannot create {}: {}", path,
               errno_text());
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      position_(other.position_) {}

void OutputFile::append(std::span<const std::byte> bytes) {
  write_at(position_, bytes);
  position_ += static_cast<int64_t>(bytes.size());
}

void OutputFile::write_at(int64_t offset, std::span<const std::byte> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t wrote = pwrite(descriptor_, bytes.data() + done, bytes.size() - done,
                                 offset + static_cast<int64_t>(done));
    if (wrote < 0 && errno == EINTR) continue;
    MARROW_CHECK(wrote > 0, ExitCode::kDeviceFault,
                 Fix("free space on this disk (or raise its quota), or write to another folder"),
                 "cannot write {} bytes to {} at {}: {} ({} bytes free)", bytes.size() - done,
                 path_, offset + static_cast<int64_t>(done), errno_text(), free_bytes(path_));
    done += static_cast<size_t>(wrote);
  }
}

void OutputFile::truncate_to(int64_t size) {
  MARROW_CHECK(ftruncate(descriptor_, size) == 0, ExitCode::kDeviceFault,
               Fix("free space on this disk (or raise its quota), or write to another folder"),
               "cannot set the size of {} to {} bytes: {} ({} bytes free)", path_, size,
               errno_text(), free_bytes(path_));
}

void OutputFile::sync() {
  MARROW_CHECK(fsync(descriptor_) == 0, ExitCode::kDeviceFault, Fix("check the disk"),
               "cannot flush {}: {}", path_, errno_text());
}

void OutputFile::close() {
  const int status = ::close(std::exchange(descriptor_, -1));
  MARROW_CHECK(status == 0, ExitCode::kDeviceFault, Fix("check the disk"), "cannot close {}: {}",
               path_, errno_text());
}

}  // namespace marrow
