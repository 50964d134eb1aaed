#include "base/log.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "base/error.h"

namespace marrow {
namespace {

std::string time_stamp() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

}  // namespace

Logger::~Logger() {
  if (progress_shown_) std::fputc('\n', stderr);
  if (file_ != nullptr) std::fclose(file_);
}

void Logger::open_file(const std::string& path) {
  file_ = std::fopen(path.c_str(), "a");
  MARROW_CHECK(file_ != nullptr, ExitCode::kDeviceFault,
               Fix("check that the folder [log] dir can be written"), "cannot open {}: {}", path,
               std::strerror(errno));
}

void Logger::write(std::string_view line, bool show) {
  std::string out;
  if (show) {
    if (progress_shown_) out = "\n";
    progress_shown_ = false;
    out.append(line).append("\n");
    std::fwrite(out.data(), 1, out.size(), stderr);
  }
  if (file_ != nullptr) {
    out = time_stamp().append(" ").append(line).append("\n");
    std::fwrite(out.data(), 1, out.size(), file_);
    std::fflush(file_);
  }
}

void Logger::info(std::string_view line) { write(line, !quiet_); }

void Logger::warn(std::string_view line) { write(std::string("warning: ").append(line), true); }

void Logger::progress(std::string_view line) {
  if (quiet_) return;
  static const bool terminal = isatty(STDERR_FILENO) == 1;
  std::string out = terminal ? "\r\033[K" : "";
  out.append(line);
  if (!terminal) out += "\n";
  std::fwrite(out.data(), 1, out.size(), stderr);
  progress_shown_ = terminal;
}

}  // namespace marrow
