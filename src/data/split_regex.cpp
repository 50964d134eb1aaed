#include "data/split_regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <vector>

#include "base/error.h"

namespace marrow {
namespace {

// White_Space; PCRE2's own \s has U+180E too.
constexpr std::string_view kSpace = "\\x09-\\x0d\\x85\\p{Z}";
constexpr std::string_view kCategories[] = {"L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc",
                                            "Me", "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Ps",
                                            "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk", "So",
                                            "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Co", "Cn"};
constexpr std::string_view kGroups[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"};
// Letter pairs that caseless Oniguruma also finds as one character (ß, ligatures).
constexpr std::string_view kFolds[] = {"ss", "ff", "fi", "fl", "st"};

// Walks over a pattern construct by construct; each step appends its translation or refuses.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  bool run() {
    while (at_ < pattern_.size()) {
      if (!step()) return false;
    }
    return groups_.empty();
  }
  std::string take_text() { return std::move(out_); }
  std::string refused_text() const {
    return at_ < pattern_.size() ? std::string(pattern_.substr(at_, 12)) : "the pattern's end";
  }

 private:
  bool starts_with(std::string_view text) const {
    return pattern_.substr(at_).substr(0, text.size()) == text;
  }
  bool copy(size_t count) {
    out_ += pattern_.substr(at_, count);
    at_ += count;
    return true;
  }
  bool replace(size_t count, std::string_view text) {
    out_ += text;
    at_ += count;
    return true;
  }
  bool caseless() const { return std::find(groups_.begin(), groups_.end(), true) != groups_.end(); }

  bool step() {
    const char c = pattern_[at_];
    const char before = previous_literal_;
    previous_literal_ = 0;
    switch (c) {
      case '\\':
        return escape(false);
      case '[':
        return character_class();
      case '(':
        return open_group();
      case ')':
        if (groups_.empty()) return false;
        groups_.pop_back();
        return copy(1);
      case '{':
        return counted_repeat();
      case '*':
      case '+':
      case '?':
        return copy(at_ + 1 < pattern_.size() &&
                            (pattern_[at_ + 1] == '?' || pattern_[at_ + 1] == '+')
                        ? 2
                        : 1);
      case '^':
      case '$':
      case ']':
      case '}':
        return false;
      default:
        if (caseless() && std::isalpha(static_cast<unsigned char>(c))) {
          previous_literal_ = static_cast<char>(std::tolower(c));
          const char pair[] = {before, previous_literal_};
          for (const std::string_view fold : kFolds) {
            if (fold == std::string_view(pair, 2)) return false;
          }
        }
        return copy(1);
    }
  }

  bool open_group() {
    if (at_ + 1 < pattern_.size() && pattern_[at_ + 1] == '?') {
      for (const std::string_view group : kGroups) {
        if (!starts_with(group)) continue;
        groups_.push_back(group == "(?i:");
        return copy(group.size());
      }
      return false;
    }
    groups_.push_back(false);
    return copy(1);
  }

  // {n}, {n,} or {n,m}, with nothing behind it that the engines read differently.
  bool counted_repeat() {
    size_t end = at_ + 1;
    bool comma = false;
    while (end < pattern_.size() && pattern_[end] != '}') {
      const char c = pattern_[end];
      if (c == ',' ? comma || end == at_ + 1 : !std::isdigit(static_cast<unsigned char>(c))) {
        return false;
      }
      comma = comma || c == ',';
      ++end;
    }
    if (end >= pattern_.size() || end == at_ + 1) return false;
    if (end + 1 < pattern_.size() &&
        std::string_view("?+*{").find(pattern_[end + 1]) != std::string_view::npos) {
      return false;
    }
    return copy(end + 1 - at_);
  }

  bool escape(bool in_class) {
    if (at_ + 1 >= pattern_.size()) return false;
    const char c = pattern_[at_ + 1];
    switch (c) {
      case 's':
        return replace(2, in_class ? std::string(kSpace) : fmt::format("[{}]", kSpace));
      case 'S':
        return !in_class && replace(2, fmt::format("[^{}]", kSpace));
      case 'd':
        return !caseless() && replace(2, "\\p{Nd}");
      case 'D':
        return !caseless() && replace(2, "\\P{Nd}");
      case 'v':
        return replace(2, "\\x0b");
      case 'r':
      case 'n':
      case 't':
      case 'f':
        return copy(2);
      case 'p':
      case 'P':
        return property();
      case 'x':
      case 'u':
        return hexadecimal();
      default:
        if (std::isalnum(static_cast<unsigned char>(c)) || static_cast<uint8_t>(c) >= 0x80) {
          return false;
        }
        return copy(2);
    }
  }

  bool property() {
    const size_t end = pattern_.find('}', at_);
    if (caseless() || end == std::string_view::npos || pattern_[at_ + 2] != '{') return false;
    const std::string_view name = pattern_.substr(at_ + 3, end - at_ - 3);
    const bool known =
        std::find(std::begin(kCategories), std::end(kCategories), name) != std::end(kCategories);
    return known && copy(end + 1 - at_);
  }

  // \xHH and \x{H…}, \uHHHH.
  bool hexadecimal() {
    size_t first = at_ + 2, count = pattern_[at_ + 1] == 'x' ? 2 : 4, size = count + 2;
    if (pattern_[at_ + 1] == 'x' && first < pattern_.size() && pattern_[first] == '{') {
      const size_t end = pattern_.find('}', first);
      if (end == std::string_view::npos) return false;
      ++first;
      count = end - first;
      size = end + 1 - at_;
    }
    const std::string_view digits = pattern_.substr(first, count);
    const bool valid = digits.size() == count && count > 0 && count <= 6 &&
                       std::all_of(digits.begin(), digits.end(),
                                   [](unsigned char digit) { return std::isxdigit(digit) != 0; });
    if (!valid || (size == 4 && digits[0] >= '8')) return false;  // \x80…: a byte, not a character
    return replace(size, fmt::format("\\x{{{}}}", digits));
  }

  bool character_class() {
    copy(1);
    if (starts_with("^")) {
      if (caseless()) return false;
      copy(1);
    }
    if (starts_with("]")) return false;
    while (at_ < pattern_.size() && pattern_[at_] != ']') {
      if (pattern_[at_] == '[' || starts_with("&&")) return false;  // nested sets
      const bool done = pattern_[at_] == '\\' ? escape(true) : copy(1);
      if (!done) return false;
    }
    return at_ < pattern_.size() && copy(1);
  }

  std::string_view pattern_;
  size_t at_ = 0;
  std::string out_;
  std::vector<bool> groups_;   // open groups: is it caseless?
  char previous_literal_ = 0;  // a letter in a caseless group, just before `at_`
};

std::string pcre2_error_text(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

}  // namespace

std::string translate_pattern(std::string_view pattern, std::string& refused) {
  Translator translator(pattern);
  if (translator.run()) return translator.take_text();
  refused = translator.refused_text();
  return "";
}

RegexScratch::RegexScratch() {
  match_ = pcre2_match_data_create(1, nullptr);
  context_ = pcre2_match_context_create(nullptr);
  stack_ = pcre2_jit_stack_create(64 << 10, 256 << 20, nullptr);  // address space, not memory
  MARROW_CHECK(match_ && context_ && stack_, ExitCode::kDeviceFault, Fix("free some memory"),
               "no memory for a regular expression's match");
  pcre2_set_match_limit(context_, UINT32_MAX);
  pcre2_jit_stack_assign(context_, nullptr, stack_);
}

RegexScratch::~RegexScratch() {
  pcre2_jit_stack_free(stack_);
  pcre2_match_context_free(context_);
  pcre2_match_data_free(match_);
}

SplitRegex::SplitRegex(std::string_view pattern, std::string& problem) {
  std::string refused;
  const std::string translated = translate_pattern(pattern, refused);
  if (!refused.empty() || translated.empty()) {
    problem = fmt::format("\"{}\" is not supported", refused);
    return;
  }
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_ =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NO_AUTO_CAPTURE, &error, &offset, context.get());
  if (code_ == nullptr) {
    problem = pcre2_error_text(error);
    return;
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code_, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) problem = "it matches the empty string";
  compiled_to_machine_code_ = pcre2_jit_compile(code_, PCRE2_JIT_COMPLETE) == 0;
}

SplitRegex::~SplitRegex() { pcre2_code_free(code_); }

SplitRegex::SplitRegex(SplitRegex&& other) noexcept
    : code_(std::exchange(other.code_, nullptr)),
      compiled_to_machine_code_(other.compiled_to_machine_code_) {}

bool SplitRegex::find(std::string_view text, size_t from, RegexScratch& scratch, size_t& begin,
                      size_t& end) const {
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const int result =
      compiled_to_machine_code_
          ? pcre2_jit_match(code_, subject, text.size(), from, 0, scratch.match_, scratch.context_)
          : pcre2_match(code_, subject, text.size(), from, PCRE2_NO_UTF_CHECK, scratch.match_,
                        scratch.context_);
  if (result == PCRE2_ERROR_NOMATCH) return false;
  MARROW_CHECK(result >= 0, ExitCode::kBadInput,
               Fix("split the document: its text needs too much backtracking"),
               "matching the tokenizer's split pattern in {} bytes, from byte {}: {}", text.size(),
               from, pcre2_error_text(result));
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(scratch.match_);
  begin = offsets[0];
  end = offsets[1];
  return true;
}

}  // namespace marrow
