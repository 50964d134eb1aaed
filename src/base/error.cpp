#include "base/error.h"

#include <backtrace.h>
#include <cxxabi.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>

#include "base/json.h"

namespace marrow {
namespace {

constexpr size_t kMaxFrames = 12;

// "src/train/loop.cpp" from the absolute path that the compiler recorded.
std::string repository_path(const char* file) {
  const std::string_view path(file);
  for (const char* root : {"/src/", "/tests/", "/bench/"}) {
    if (const size_t at = path.rfind(root); at != std::string_view::npos) {
      return std::string(path.substr(at + 1));
    }
  }
  return std::string(path);
}

// A function's name without its parameters.
std::string demangled(const char* symbol) {
  const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(symbol, nullptr, nullptr, nullptr), std::free);
  const std::string text = name ? name.get() : symbol;
  return text.substr(0, text.find('(', 1));
}

int on_frame(void* data, uintptr_t, const char* file, int line, const char* function) {
  auto& trace = *static_cast<std::vector<std::string>*>(data);
  // Frames without line information are libtorch's and libc's: noise to the reader.
  if (file == nullptr || function == nullptr) return 0;
  if (std::strstr(file, "/src/") == nullptr && std::strstr(file, "/tests/") == nullptr) return 0;
  if (std::strstr(file, "base/error.") != nullptr) return 0;
  trace.push_back(fmt::format("{} {}:{}", demangled(function), repository_path(file), line));
  return trace.size() >= kMaxFrames ? 1 : 0;
}

std::vector<std::string> capture_trace() {
  // libbacktrace's state cannot be freed; it is made once and kept, as its manual asks.
  static backtrace_state* const state = backtrace_create_state(
      nullptr, 1, [](void*, const char*, int) {}, nullptr);
  std::vector<std::string> trace;
  backtrace_full(
      state, 2, on_frame, [](void*, const char*, int) {}, &trace);
  return trace;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

}  // namespace

Error::Error(ExitCode code, std::string what, Fix fix, const char* file, int line) {
  report_.code = code;
  report_.what = std::move(what);
  report_.where = fmt::format("{}:{}", repository_path(file), line);
  report_.trace = capture_trace();
  report_.fix = std::move(fix.text);
}

Error& Error::add_who(std::string circumstance) {
  report_.who.insert(report_.who.begin(), std::move(circumstance));
  return *this;
}

Error& Error::add_tensor(std::string description) {
  report_.tensors.push_back(std::move(description));
  return *this;
}

std::string Error::to_text() const {
  std::string out = fmt::format("error: {}\n  where: {}\n", report_.what, report_.where);
  for (const std::string& frame : report_.trace) out += fmt::format("         {}\n", frame);
  for (const std::string& tensor : report_.tensors) out += fmt::format("  tensor: {}\n", tensor);
  if (!report_.who.empty()) out += fmt::format("  who: {}\n", fmt::join(report_.who, ", "));
  return out + fmt::format("  fix: {}\n", report_.fix);
}

std::string Error::to_json() const {
  JsonWriter error;
  error.field("code", static_cast<int>(report_.code), "what", report_.what, "where", report_.where);
  error.field("trace", report_.trace, "tensors", report_.tensors);
  error.field("who", fmt::format("{}", fmt::join(report_.who, ", ")), "fix", report_.fix);
  return JsonWriter().raw("error", error.text()).text();
}

std::string nearest_match(std::string_view text, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = std::max<size_t>(3, text.size() / 3 + 1);
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(text, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace marrow
