// Lines for people: on the console, and in a run's log file.
#pragma once
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"

namespace marrow {

// Writes to standard error (--json keeps standard output clean) and, after `open_file`, to a file with time stamps.
class Logger {
 public:
  ~Logger();
  void open_file(const std::string& path);        // appends
  void set_quiet(bool quiet) { quiet_ = quiet; }  // file only; warnings are kept
  void info(std::string_view line) { write(line); }
  void warn(std::string_view line);                                       // "warning: …"
  const std::vector<std::string>& warnings() const { return warnings_; }  // while quiet
  // A line that replaces the previous progress line on a terminal, else one of its own. Not written to the file.
  void progress(std::string_view line);
  bool silent_for(double seconds) const;  // no line was written to the console for so long

 private:
  void write(std::string_view line);
  FileHandle file_;
  bool quiet_ = false;
  bool progress_shown_ = false;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();  // line on the console
  std::vector<std::string> warnings_;
};

}  // namespace marrow
