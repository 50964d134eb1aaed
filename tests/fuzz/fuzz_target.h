// What the fuzzers share. Each gives bytes to a production reader, which may accept them, or refuse them by an Error of
// usage or bad input with a fix; all else (another exception, a crash, a sanitizer's report, a hang) is a finding.
#pragma once
#include <backtrace.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/json.h"

// In place of libbacktrace's: errors have no call traces, which would take nearly all of the time.
extern "C" backtrace_state* backtrace_create_state(const char*, int, backtrace_error_callback, void*) {
  return nullptr;
}
extern "C" int backtrace_full(backtrace_state*, int, backtrace_full_callback, backtrace_error_callback, void*) {
  return 0;
}

namespace marrow::fuzz {

// Ends the program: something that must hold for what was accepted does not.
inline void require(bool holds, std::string_view what) {
  if (holds) return;
  fmt::print(stderr, "does not hold: {}\n", what);
  std::abort();
}

// Calls read(). Returns whether it accepted.
template <typename Read>
bool accepts(Read&& read) {
  try {
    read();
    return true;
  } catch (const Error& error) {
    const ErrorReport& report = error.report();
    const bool refused = report.code == ExitCode::kUsage || report.code == ExitCode::kBadInput;
    if (!refused) std::fputs(error.to_text().c_str(), stderr);
    require(refused && !report.what.empty() && !report.fix.empty(), "an error is of usage or bad input, with a fix");
    Json::parse(error.to_json(), "the error as JSON");
    return false;
  }
}

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// The parts of an input that stands for several files, so that one stays readable: between lines "----".
inline std::vector<std::string> parts_of(std::string_view input, size_t count) {
  constexpr std::string_view kBetween = "\n----\n";
  std::vector<std::string> parts;
  while (parts.size() < count) {
    const size_t end = parts.size() + 1 < count ? input.find(kBetween) : std::string_view::npos;
    parts.emplace_back(input.substr(0, end));
    input.remove_prefix(end == std::string_view::npos ? input.size() : end + kBetween.size());
  }
  return parts;
}

// `text` with `value` in place of each `name`.
inline std::string replaced(std::string text, std::string_view name, std::string_view value) {
  for (size_t at = 0; (at = text.find(name, at)) != std::string::npos; at += value.size()) {
    text.replace(at, name.size(), value);
  }
  return text;
}

// A folder for readers that take paths, in memory where the machine has such a place.
class ScratchFolder {
 public:
  ScratchFolder() {
    const bool memory = std::getenv("TMPDIR") == nullptr && std::filesystem::exists("/dev/shm");
    std::string name = (memory ? "/dev/shm" : std::filesystem::temp_directory_path().string()) + "/marrow-fuzz-XXXXXX";
    require(mkdtemp(name.data()) != nullptr, "a folder for scratch files can be made");
    path_ = name;
  }
  ~ScratchFolder() { std::filesystem::remove_all(path_); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string write(const std::string& name, std::string_view bytes) const {
    std::string path = path_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

 private:
  std::string path_;
};

}  // namespace marrow::fuzz
