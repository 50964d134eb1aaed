// Errors that name a line of this repository, the values, and the fix.
// A guard by name: a precompiled header out of a compiler cache may differ from this file in comments, and g++ then
// does not know it for the same file.
#ifndef MARROW_BASE_ERROR_H
#define MARROW_BASE_ERROR_H
#include <fmt/format.h>

#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace marrow {

// The process's exit code, and so the kind of an error.
enum class ExitCode : int {
  kDone = 0,
  kUsage = 2,        // wrong command line or config; a path in a config that does not exist
  kBadInput = 3,     // a file that exists and is damaged or does not fit
  kDeviceFault = 4,  // device, memory, communication or disk
  kDiverged = 5,     // non-finite loss or gradient
};

// What the reader of an error should do about it: a config key, a flag or a command. Never empty.
struct Fix {
  explicit Fix(std::string text) : text(std::move(text)) {}
  template <typename First, typename... Rest>
  explicit Fix(fmt::format_string<First, Rest...> format, First&& first, Rest&&... rest)
      : text(fmt::format(format, std::forward<First>(first), std::forward<Rest>(rest)...)) {}
  std::string text;
};

// One failure, in the fixed order of its fields. `tensors` and `who` are filled in by those who know (the executor adds
// layer and direction, the training loop the step).
struct ErrorReport {
  ExitCode code = ExitCode::kDeviceFault;
  std::string what;                  // the condition and both values
  std::string where;                 // file:line of the check
  std::vector<std::string> trace;    // call trace, innermost first: "function file:line"
  std::vector<std::string> tensors;  // "name dtype [shape] device"
  std::vector<std::string> who;      // "layer 3", "step 17": outermost first
  std::string fix;
};

class Error : public std::exception {
 public:
  // Captures the call trace. `file` is an absolute path as the compiler gives it.
  Error(ExitCode code, std::string what, Fix fix, const char* file, int line);

  const char* what() const noexcept override { return report_.what.c_str(); }
  const ErrorReport& report() const { return report_; }
  // Puts an outer circumstance ("step 17") in front of those already known.
  Error& add_who(std::string circumstance);
  Error& add_tensor(std::string description);

  std::string to_text() const;  // many lines, ends with "  fix: …\n"
  std::string to_json() const;  // {"error": {...}} on one line

 private:
  ErrorReport report_;
};

// JSON string literal of `text`, quotes included; invalid UTF-8 becomes U+FFFD. Of base/json.cpp.
std::string json_quote(std::string_view text);

// The entry of `candidates` nearest to `text` by edits, or "" if none is near (a third of it).
std::string nearest_match(std::string_view text, const std::vector<std::string>& candidates);

}  // namespace marrow

// Throws Error unless `condition` holds. Usage:
//   MARROW_CHECK(rows % ep == 0, ExitCode::kUsage, Fix("set mesh.ep to a divisor of 8"),
//                "{} experts do not divide by mesh.ep = {}", rows, ep);
#define MARROW_CHECK(condition, code, fix, ...) \
  do {                                          \
    if (!(condition)) [[unlikely]] {            \
      MARROW_THROW(code, fix, __VA_ARGS__);     \
    }                                           \
  } while (false)

#define MARROW_THROW(code, fix, ...) throw ::marrow::Error(code, ::fmt::format(__VA_ARGS__), fix, __FILE__, __LINE__)
#endif
