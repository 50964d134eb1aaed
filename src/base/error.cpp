#include "base/error.h"

#include <backtrace.h>
#include <cxxabi.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

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

std::string demangled(const char* symbol) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &status), std::free);
  std::string text = status == 0 ? name.get() : symbol;
  if (const size_t parameters = text.find('('); parameters != std::string::npos && parameters > 0) {
    text.resize(parameters);
  }
  return text;
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
  static backtrace_state* const state =
      backtrace_create_state(nullptr, 1, [](void*, const char*, int) {}, nullptr);
  std::vector<std::string> trace;
  backtrace_full(state, 2, on_frame, [](void*, const char*, int) {}, &trace);
  return trace;
}

std::string json_list(const std::vector<std::string>& items) {
  std::string out = "[";
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += ", ";
    out += json_quote(items[i]);
  }
  return out + "]";
}

std::string joined(const std::vector<std::string>& items, const char* separator) {
  return fmt::format("{}", fmt::join(items, separator));
}

// Length of the valid UTF-8 sequence at `text[at]`, or 0.
size_t utf8_length(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3
                        : lead < 0xF5 ? 4 : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  }
  const unsigned char second = length > 1 ? byte(at + 1) : 0;
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool surrogate_or_high = (lead == 0xED && second > 0x9F) || (lead == 0xF4 && second > 0x8F);
  return overlong || surrogate_or_high ? 0 : length;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
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
  if (!report_.who.empty()) out += fmt::format("  who: {}\n", joined(report_.who, ", "));
  return out + fmt::format("  fix: {}\n", report_.fix);
}

std::string Error::to_json() const {
  return fmt::format(
      R"({{"error": {{"code": {}, "what": {}, "where": {}, "trace": {}, "tensors": {}, "who": {}, "fix": {}}}}})",
      static_cast<int>(report_.code), json_quote(report_.what), json_quote(report_.where),
      json_list(report_.trace), json_list(report_.tensors), json_quote(joined(report_.who, ", ")),
      json_quote(report_.fix));
}

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text, i);
    const char c = text[i];
    if (length == 0) {
      out += "\xEF\xBF\xBD";
      ++i;
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out.append(text.substr(i, length));
    }
    i += length;
  }
  return out + '"';
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
