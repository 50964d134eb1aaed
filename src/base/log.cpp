#include "base/log.h"

#include <fmt/chrono.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace marrow {

Logger::~Logger() {
  if (progress_shown_) std::fputc('\n', stderr);
}

void Logger::open_file(const std::string& path) {
  file_.reset(std::fopen(path.c_str(), "a"));
  MARROW_CHECK(file_, ExitCode::kDeviceFault, Fix("check that the folder [log] dir can be written"),
               "cannot open {}: {}", path, std::strerror(errno));
}

bool Logger::silent_for(double seconds) const {
  return !quiet_ && std::chrono::duration<double>(std::chrono::steady_clock::now() - last_).count() >= seconds;
}

void Logger::write(std::string_view line) {
  last_ = std::chrono::steady_clock::now();
  if (!quiet_) fmt::print(stderr, "{}{}\n", std::exchange(progress_shown_, false) ? "\n" : "", line);
  if (!file_) return;
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  fmt::print(file_.get(), "{:%Y-%m-%d %H:%M:%S} {}\n", *localtime_r(&now, &local), line);
  std::fflush(file_.get());
}

void Logger::warn(std::string_view line) {
  if (quiet_) warnings_.emplace_back(line);
  write(fmt::format("warning: {}", line));
}

void Logger::progress(std::string_view line) {
  if (quiet_) return;
  last_ = std::chrono::steady_clock::now();
  static const bool terminal = isatty(STDERR_FILENO) == 1;
  fmt::print(stderr, "{}{}{}", terminal ? "\r\033[K" : "", line, terminal ? "" : "\n");
  progress_shown_ = terminal;
}

}  // namespace marrow
