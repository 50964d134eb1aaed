// Regular expressions: PCRE2, compiled to machine code.
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/error.h"

namespace marrow {

inline std::string regex_error(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

// What one thread needs to run expressions, and where its last match lies.
class RegexScratch {
 public:
  RegexScratch() {
    MARROW_CHECK(match_ && context_ && stack_, ExitCode::kDeviceFault, Fix("free some memory"),
                 "no memory for a regular expression's match");
    pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
  }
  // Group 0 is the whole match, 1 and 2 the first captures.
  size_t begin(size_t group = 0) const { return pcre2_get_ovector_pointer(match_.get())[2 * group]; }
  size_t end(size_t group = 0) const { return pcre2_get_ovector_pointer(match_.get())[2 * group + 1]; }

 private:
  friend class Regex;
  std::shared_ptr<pcre2_match_data> match_{pcre2_match_data_create(3, nullptr), pcre2_match_data_free};
  std::shared_ptr<pcre2_match_context> context_{pcre2_match_context_create(nullptr), pcre2_match_context_free};
  // At most 256 MiB: address space, not memory.
  std::shared_ptr<pcre2_jit_stack> stack_{pcre2_jit_stack_create(64 << 10, 256 << 20, nullptr), pcre2_jit_stack_free};
};

class Regex {
 public:
  enum class Unit { kCharacters, kBytes };
  // Only named groups capture. Throws std::invalid_argument if the pattern is wrong.
  explicit Regex(std::string_view pattern, Unit unit = Unit::kCharacters) {
    const std::shared_ptr<pcre2_compile_context> context(pcre2_compile_context_create(nullptr),
                                                         pcre2_compile_context_free);
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    const uint32_t unicode = unit == Unit::kCharacters ? PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE : 0;
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              unicode | PCRE2_NO_AUTO_CAPTURE, &error, &offset, context.get()),
                pcre2_code_free);
    if (!code_) throw std::invalid_argument(regex_error(error));
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
  }
  bool matches_empty() const {  // true also for patterns that call groups
    uint32_t may = 0;
    pcre2_pattern_info(code_.get(), PCRE2_INFO_MATCHEMPTY, &may);
    return may != 0;
  }
  // Steps of a match that expressions of published tokenizers stay far below, but not one that tries each way to cut a
  // word in pieces.
  static uint32_t most_steps(size_t bytes) {
    return static_cast<uint32_t>(std::min<size_t>(10'000'000 + bytes * 16, UINT32_MAX));
  }
  // Finds the first match in `text` (of kCharacters: valid UTF-8) at or after `from`; false if there is none. One that
  // takes too much memory or time is an Error (kBadInput).
  bool find(std::string_view text, size_t from, RegexScratch& scratch) const {
    const auto run = [&](auto* match, uint32_t options) {
      return match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from, options,
                   scratch.match_.get(), scratch.context_.get());
    };
    pcre2_set_match_limit(scratch.context_.get(), most_steps(text.size()));
    int result = run(pcre2_jit_match, 0);
    // Where this machine allows no new machine code.
    if (result == PCRE2_ERROR_JIT_BADOPTION) result = run(pcre2_match, PCRE2_NO_UTF_CHECK);
    MARROW_CHECK(result >= 0 || result == PCRE2_ERROR_NOMATCH, ExitCode::kBadInput,
                 Fix("split the document: its text needs too much backtracking"),
                 "matching a regular expression in {} bytes, from byte {}: {}", text.size(), from, regex_error(result));
    return result >= 0;
  }

 private:
  std::shared_ptr<pcre2_code> code_;
};

}  // namespace marrow
