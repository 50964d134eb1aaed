// Regular expressions: PCRE2, compiled to machine code.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace marrow {

// What one thread needs to run expressions, and where its last match lies.
class RegexScratch {
 public:
  RegexScratch();
  size_t begin(size_t group = 0) const;  // group 0 is the whole match, 1 and 2 the first captures
  size_t end(size_t group = 0) const;

 private:
  friend class Regex;
  std::shared_ptr<pcre2_real_match_data_8> match_;
  std::shared_ptr<pcre2_real_match_context_8> context_;
  std::shared_ptr<pcre2_real_jit_stack_8> stack_;
};

class Regex {
 public:
  enum class Unit { kCharacters, kBytes };
  // Only named groups capture. Throws std::invalid_argument if the pattern is wrong.
  explicit Regex(std::string_view pattern, Unit unit = Unit::kCharacters);
  bool matches_empty() const;  // true also for patterns that call groups
  // Finds the first match in `text` (of kCharacters: valid UTF-8) at or after `from`; false if there is none. One that
  // takes too much memory is an Error (kBadInput).
  bool find(std::string_view text, size_t from, RegexScratch& scratch) const;

 private:
  std::shared_ptr<pcre2_real_code_8> code_;
};

}  // namespace marrow
