// The regular expressions of tokenizer.json, written for Oniguruma, run by PCRE2 with equal
// results.
#pragma once
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace marrow {

// `pattern` in PCRE2's syntax. Constructs that the two engines might read differently are refused:
// then `refused` is set to the construct's text and the result is empty.
std::string translate_pattern(std::string_view pattern, std::string& refused);

// What one thread needs to run expressions.
class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class SplitRegex;
  pcre2_real_match_data_8* match_ = nullptr;
  pcre2_real_match_context_8* context_ = nullptr;
  pcre2_real_jit_stack_8* stack_ = nullptr;
};

class SplitRegex {
 public:
  // On failure `problem` says why and the expression cannot be used.
  SplitRegex(std::string_view pattern, std::string& problem);
  ~SplitRegex();
  SplitRegex(SplitRegex&& other) noexcept;
  SplitRegex& operator=(SplitRegex&&) = delete;

  // The first match in `text` (valid UTF-8) at or after `from`; false if there is none. A match is
  // never empty.
  bool find(std::string_view text, size_t from, RegexScratch& scratch, size_t& begin,
            size_t& end) const;

 private:
  pcre2_real_code_8* code_ = nullptr;
  bool compiled_to_machine_code_ = false;
};

}  // namespace marrow
