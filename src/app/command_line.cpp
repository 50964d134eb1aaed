#include "app/command_line.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace marrow {
namespace {

Fix see_help(const Subcommand& command) {
  return Fix(fmt::format("see marrow {} --help", command.name));
}

std::vector<Option> with_common_options(std::vector<Option> options) {
  options.push_back({.name = "json", .help = "print the result as one JSON object"});
  options.push_back({.name = "help", .help = "print this page", .alone = true});
  return options;
}

std::string usage_form(const Option& option) {
  const std::string value =
      option.choices.empty() ? option.value : fmt::format("{}", fmt::join(option.choices, "|"));
  if (option.takes == Takes::kNothing) return "--" + option.name;
  return fmt::format("--{} {}{}", option.name, value, option.takes == Takes::kMany ? "..." : "");
}

// "--name=value" cut at its first "=".
std::pair<std::string, std::string> cut_at_equals(const std::string& word) {
  const size_t at = word.find('=');
  if (at == std::string::npos) return {word, ""};
  return {word.substr(0, at), word.substr(at + 1)};
}

}  // namespace

CommandLine::CommandLine(const Subcommand& command, const std::vector<std::string>& words)
    : command_(command), options_(with_common_options(command.options)) {
  bool options_ended = false;
  for (size_t at = 0; at < words.size();) {
    const std::string& word = words[at];
    if (options_ended || word.size() < 2 || word[0] != '-') {
      positionals_.push_back(word);
      ++at;
    } else if (word == "--") {
      options_ended = true;
      ++at;
    } else {
      at = take_option(words, at);
    }
  }
  check_complete();
}

// Reads the option at words[at] with its values; returns the index after them.
size_t CommandLine::take_option(const std::vector<std::string>& words, size_t at) {
  const auto [dashed, inline_value] = cut_at_equals(words[at] == "-h" ? "--help" : words[at]);
  const std::string name = dashed.starts_with("--") ? dashed.substr(2) : "";
  const Option* found = nullptr;
  std::vector<std::string> names;
  for (const Option& option : options_) {
    names.push_back("--" + option.name);
    if (option.name == name) found = &option;
  }
  if (found == nullptr) {
    const std::string nearest = nearest_match(dashed, names);
    MARROW_THROW(
        ExitCode::kUsage,
        nearest.empty() ? see_help(command_) : Fix(fmt::format("did you mean {}?", nearest)),
        "marrow {} has no option {}", command_.name, dashed);
  }
  const bool has_inline = words[at].find('=') != std::string::npos;
  const bool again = values_.contains(name);
  MARROW_CHECK(!again || found->takes == Takes::kRepeated || found->takes == Takes::kMany ||
                   found->takes == Takes::kNothing,
               ExitCode::kUsage, Fix(fmt::format("give --{} once", name)), "--{} is given twice",
               name);
  std::vector<std::string>& values = values_[name];
  ++at;
  if (found->takes == Takes::kNothing) {
    MARROW_CHECK(!has_inline, ExitCode::kUsage, Fix(fmt::format("write --{} alone", name)),
                 "--{} takes no value, but {} is given", name, json_quote(inline_value));
    return at;
  }
  const size_t before = values.size();
  if (has_inline) {
    values.push_back(inline_value);
  } else if (found->takes == Takes::kMany) {
    while (at < words.size() && !words[at].starts_with("--")) values.push_back(words[at++]);
  } else if (at < words.size() && !words[at].starts_with("--")) {
    values.push_back(words[at++]);
  }
  MARROW_CHECK(values.size() > before, ExitCode::kUsage,
               Fix(fmt::format("write {}", usage_form(*found))), "--{} needs a value", name);
  for (size_t i = before; i < values.size() && !found->choices.empty(); ++i) {
    const bool valid =
        std::find(found->choices.begin(), found->choices.end(), values[i]) != found->choices.end();
    MARROW_CHECK(valid, ExitCode::kUsage, Fix(fmt::format("write {}", usage_form(*found))),
                 "--{} is {}, not one of {}", name, json_quote(values[i]),
                 fmt::join(found->choices, ", "));
  }
  return at;
}

void CommandLine::check_complete() const {
  for (const Option& option : options_) {
    if (option.alone && has(option.name)) return;
  }
  const size_t wanted = command_.positionals.size();
  MARROW_CHECK(positionals_.size() >= wanted, ExitCode::kUsage, see_help(command_),
               "marrow {} needs {} argument{} ({}), {} given", command_.name, wanted,
               wanted == 1 ? "" : "s", fmt::join(command_.positionals, " "), positionals_.size());
  MARROW_CHECK(positionals_.size() == wanted, ExitCode::kUsage, see_help(command_),
               "marrow {} takes {} argument{}, but {} is given more", command_.name, wanted,
               wanted == 1 ? "" : "s", json_quote(positionals_[wanted]));
  for (const Option& option : options_) {
    MARROW_CHECK(!option.required || has(option.name), ExitCode::kUsage,
                 Fix(fmt::format("add {}", usage_form(option))), "marrow {} needs --{}",
                 command_.name, option.name);
  }
}

const Option& CommandLine::option(const std::string& name) const {
  for (const Option& option : options_) {
    if (option.name == name) return option;
  }
  MARROW_THROW(ExitCode::kUsage, Fix(fmt::format("declare --{} in the subcommand's file", name)),
               "marrow {} reads --{}, which it does not declare", command_.name, name);
}

std::string CommandLine::text(const std::string& name) const {
  const Option& declared = option(name);
  const auto found = values_.find(name);
  return found == values_.end() ? declared.fallback : found->second.front();
}

std::vector<std::string> CommandLine::list(const std::string& name) const {
  option(name);
  const auto found = values_.find(name);
  return found == values_.end() ? std::vector<std::string>{} : found->second;
}

int64_t CommandLine::integer(const std::string& name, int64_t min, int64_t max) const {
  const std::string given = text(name);
  int64_t value = 0;
  const char* end = given.data() + given.size();
  const auto [stop, fault] = std::from_chars(given.data(), end, value);
  const std::string range = max == INT64_MAX ? fmt::format("an integer of at least {}", min)
                                             : fmt::format("an integer from {} to {}", min, max);
  MARROW_CHECK(fault == std::errc() && stop == end && min <= value && value <= max,
               ExitCode::kUsage, Fix(fmt::format("give --{} {}", name, range)),
               "--{} is {}, not {}", name, json_quote(given), range);
  return value;
}

double CommandLine::real(const std::string& name, double min, double max) const {
  const std::string given = text(name);
  double value = 0.0;
  const char* end = given.data() + given.size();
  const auto [stop, fault] = std::from_chars(given.data(), end, value);
  const std::string range = fmt::format("a number from {} to {}", min, max);
  MARROW_CHECK(fault == std::errc() && stop == end && min <= value && value <= max,
               ExitCode::kUsage, Fix(fmt::format("give --{} {}", name, range)),
               "--{} is {}, not {}", name, json_quote(given), range);
  return value;
}

void CommandLine::print(const std::string& text, const JsonWriter& json) const {
  std::string out = this->json() ? json.text() : text;
  if (!out.ends_with('\n')) out += '\n';
  std::fwrite(out.data(), 1, out.size(), stdout);
  std::fflush(stdout);
}

std::string help_text(const Subcommand& command) {
  std::string usage = "marrow " + command.name;
  for (const std::string& positional : command.positionals) usage += " " + positional;
  std::string table;
  for (const Option& option : with_common_options(command.options)) {
    const std::string form = usage_form(option);
    const std::string repeated = option.takes == Takes::kRepeated ? "[...]" : "";
    usage += option.required ? " " + form : fmt::format(" [{}]{}", form, repeated);
    table += fmt::format("  {:<28}  {}", form, option.help);
    if (!option.fallback.empty()) table += fmt::format(" (default: {})", option.fallback);
    table += "\n";
  }
  std::string out = fmt::format("{}\n\nusage: {}\n\n{}\nexample:\n", command.summary, usage, table);
  for (size_t start = 0; start < command.example.size();) {
    const size_t end = std::min(command.example.find('\n', start), command.example.size());
    out += "  " + command.example.substr(start, end - start) + "\n";
    start = end + 1;
  }
  if (!command.notes.empty()) out += "\n" + command.notes + "\n";
  return out;
}

}  // namespace marrow
