#include "data/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <stdexcept>

#include "base/error.h"

namespace marrow {
namespace {

std::string error_text(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

RegexScratch::RegexScratch()
    : match_(pcre2_match_data_create(3, nullptr), pcre2_match_data_free),
      context_(pcre2_match_context_create(nullptr), pcre2_match_context_free),
      stack_(pcre2_jit_stack_create(64 << 10, 256 << 20, nullptr),  // address space, not memory
             pcre2_jit_stack_free) {
  MARROW_CHECK(match_ && context_ && stack_, ExitCode::kDeviceFault, Fix("free some memory"),
               "no memory for a regular expression's match");
  pcre2_set_match_limit(context_.get(), UINT32_MAX);
  pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
}

size_t RegexScratch::begin(size_t group) const { return pcre2_get_ovector_pointer(match_.get())[2 * group]; }
size_t RegexScratch::end(size_t group) const { return pcre2_get_ovector_pointer(match_.get())[2 * group + 1]; }

Regex::Regex(std::string_view pattern, Unit unit) {
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  const uint32_t unicode = unit == Unit::kCharacters ? PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE : 0;
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                            unicode | PCRE2_NO_AUTO_CAPTURE, &error, &offset, context.get()),
              pcre2_code_free);
  if (!code_) throw std::invalid_argument(error_text(error));
  pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
}

bool Regex::matches_empty() const {
  uint32_t may = 0;
  pcre2_pattern_info(code_.get(), PCRE2_INFO_MATCHEMPTY, &may);
  return may != 0;
}

bool Regex::find(std::string_view text, size_t from, RegexScratch& scratch) const {
  const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  int result =
      pcre2_jit_match(code_.get(), subject, text.size(), from, 0, scratch.match_.get(), scratch.context_.get());
  if (result == PCRE2_ERROR_JIT_BADOPTION) {  // this machine allows no new machine code
    result = pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK, scratch.match_.get(),
                         scratch.context_.get());
  }
  MARROW_CHECK(result >= 0 || result == PCRE2_ERROR_NOMATCH, ExitCode::kBadInput,
               Fix("split the document: its text needs too much backtracking"),
               "matching a regular expression in {} bytes, from byte {}: {}", text.size(), from, error_text(result));
  return result >= 0;
}

}  // namespace marrow
