// A subcommand's command line: what it declares, and what the user gave.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"

namespace marrow {

// One declared option.
struct Option {
  // As in a usage line: "--output PATH" is needed, "[--overwrite]" is not, "[--set KEY=VALUE]..." may be repeated,
  // "--input PATH..." takes all words up to the next option. A value in small letters lists what is allowed: "[--dtype
  // fp32|bf16]". Only a value TEXT may be empty. "[--help…]" needs nothing else beside it.
  std::string form;
  std::string help;
  std::string fallback = {};  // the value where the option is not given; shown in the help

  std::string name() const;   // "output"
  std::string value() const;  // "PATH"; "" where it takes none
  std::string bare() const;   // "--output PATH"
  bool required() const { return form[0] != '['; }
  bool repeated() const { return form.ends_with("]..."); }
  bool many() const { return bare().ends_with("..."); }
};

class CommandLine;

// One subcommand. Each file of src/app returns its own: `Subcommand tokenize_command()`; main.cpp has the table.
struct Subcommand {
  std::string name;
  std::string summary;                        // one line
  std::vector<std::string> positionals = {};  // "RUN.toml": each is needed exactly once
  std::vector<Option> options = {};           // --json and --help are added to each
  std::string example;                        // one or more whole command lines
  std::string notes = {};                     // free text at the end of the help
  int (*run)(const CommandLine&) = nullptr;   // returns the exit code
};

// The words after the subcommand's name, checked against its declaration. Every fault is an Error with kUsage that
// names the word, the nearest valid option, and `marrow NAME --help`.
class CommandLine {
 public:
  // `command` must outlive this object.
  CommandLine(const Subcommand& command, const std::vector<std::string>& words);

  const std::string& positional(size_t index = 0) const { return positionals_.at(index); }
  bool has(const std::string& name) const { return values_.contains(name); }  // was it given?

  std::string text(const std::string& name) const;               // or the fallback
  std::vector<std::string> list(const std::string& name) const;  // of an option with "..."
  int64_t integer(const std::string& name, int64_t min, int64_t max = INT64_MAX) const;
  double real(const std::string& name, double min, double max) const;

  // Quiet under --json: standard error then holds no more than the one line of an error.
  Logger& logger() const { return logger_; }
  // The result on standard output: `json` on one line under --json (with "warnings", if any), else `text`.
  void print(const std::string& text, JsonWriter json) const;

 private:
  template <typename T>
  T number(const std::string& name, T min, T max, const std::string& range) const;
  size_t take_option(const std::vector<std::string>& words, size_t at);
  void check_complete() const;
  const Subcommand& command_;
  std::vector<Option> options_;  // declared ones, --json and --help
  std::map<std::string, std::vector<std::string>> values_;
  std::vector<std::string> positionals_;
  mutable Logger logger_;
};

// The page that `marrow NAME --help` prints.
std::string help_text(const Subcommand& command);

}  // namespace marrow
