#include "app/command_line.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <sstream>

namespace marrow {
namespace {

Fix see_help(const Subcommand& command) { return Fix(fmt::format("see marrow {} --help", command.name)); }

std::vector<Option> with_common_options(std::vector<Option> options) {
  options.push_back({.name = "json", .help = "print the result as one JSON object"});
  options.push_back({.name = "help", .help = "print this page", .alone = true});
  return options;
}

std::string usage_form(const Option& option) {
  const std::string value = option.choices.empty() ? option.value : fmt::format("{}", fmt::join(option.choices, "|"));
  if (option.takes == Takes::kNothing) return "--" + option.name;
  return fmt::format("--{} {}{}", option.name, value, option.takes == Takes::kMany ? "..." : "");
}

}  // namespace

CommandLine::CommandLine(const Subcommand& command, const std::vector<std::string>& words)
    : command_(command), options_(with_common_options(command.options)) {
  for (size_t at = 0; at < words.size();) {
    if (words[at].size() > 1 && words[at][0] == '-') {
      at = take_option(words, at);
    } else {
      positionals_.push_back(words[at++]);
    }
  }
  check_complete();
}

// Reads the option at words[at] with its values; returns the index after them.
size_t CommandLine::take_option(const std::vector<std::string>& words, size_t at) {
  const std::string word = words[at] == "-h" ? "--help" : words[at];
  const size_t equals = word.find('=');
  const std::string dashed = word.substr(0, equals);
  std::vector<std::string> names;
  for (const Option& option : options_) names.push_back("--" + option.name);
  const auto known = std::find(names.begin(), names.end(), dashed);
  if (known == names.end()) {
    const std::string nearest = nearest_match(dashed, names);
    MARROW_THROW(ExitCode::kUsage, nearest.empty() ? see_help(command_) : Fix(fmt::format("did you mean {}?", nearest)),
                 "marrow {} has no option {}", command_.name, dashed);
  }
  const Option& option = options_[static_cast<size_t>(known - names.begin())];
  MARROW_CHECK(option.takes != Takes::kOne || !has(option.name), ExitCode::kUsage,
               Fix(fmt::format("give {} once", dashed)), "{} is given twice", dashed);
  std::vector<std::string>& values = values_[option.name];
  ++at;
  if (option.takes == Takes::kNothing) {
    MARROW_CHECK(equals == std::string::npos, ExitCode::kUsage, Fix(fmt::format("write {} alone", dashed)),
                 "{} takes no value, but {} is given", dashed, json_quote(word.substr(equals + 1)));
    return at;
  }
  const size_t before = values.size();
  if (equals != std::string::npos) values.push_back(word.substr(equals + 1));
  while (at < words.size() && !words[at].starts_with("--") &&
         (values.size() == before || (option.takes == Takes::kMany && equals == std::string::npos))) {
    values.push_back(words[at++]);
  }
  const Fix form(fmt::format("write {}", usage_form(option)));
  MARROW_CHECK(values.size() > before, ExitCode::kUsage, form, "{} needs a value", dashed);
  const auto& choices = option.choices;
  MARROW_CHECK(choices.empty() || std::find(choices.begin(), choices.end(), values.back()) != choices.end(),
               ExitCode::kUsage, form, "{} is {}, not one of {}", dashed, json_quote(values.back()),
               fmt::join(choices, ", "));
  return at;
}

void CommandLine::check_complete() const {
  for (const Option& option : options_) {
    if (option.alone && has(option.name)) return;
  }
  const size_t wanted = command_.positionals.size(), given = positionals_.size();
  MARROW_CHECK(given >= wanted, ExitCode::kUsage, see_help(command_), "marrow {} needs {} argument{} ({}), {} given",
               command_.name, wanted, wanted == 1 ? "" : "s", fmt::join(command_.positionals, " "), given);
  MARROW_CHECK(given == wanted, ExitCode::kUsage, see_help(command_),
               "marrow {} takes {} argument{}, but {} is given more", command_.name, wanted, wanted == 1 ? "" : "s",
               json_quote(positionals_[wanted]));
  for (const Option& option : options_) {
    MARROW_CHECK(!option.required || has(option.name), ExitCode::kUsage, Fix(fmt::format("add {}", usage_form(option))),
                 "marrow {} needs --{}", command_.name, option.name);
  }
}

std::string CommandLine::text(const std::string& name) const {
  if (has(name)) return values_.at(name).front();
  for (const Option& option : options_) {
    if (option.name == name) return option.fallback;
  }
  MARROW_THROW(ExitCode::kUsage, Fix(fmt::format("declare --{} in the subcommand's file", name)),
               "marrow {} reads --{}, which it does not declare", command_.name, name);
}

std::vector<std::string> CommandLine::list(const std::string& name) const {
  return has(name) ? values_.at(name) : std::vector<std::string>{};
}

template <typename T>
T CommandLine::number(const std::string& name, T min, T max, const std::string& range) const {
  const std::string given = text(name);
  T value{};
  const char* end = given.data() + given.size();
  const auto [stop, fault] = std::from_chars(given.data(), end, value);
  MARROW_CHECK(fault == std::errc() && stop == end && min <= value && value <= max, ExitCode::kUsage,
               Fix(fmt::format("give --{} {}", name, range)), "--{} is {}, not {}", name, json_quote(given), range);
  return value;
}

int64_t CommandLine::integer(const std::string& name, int64_t min, int64_t max) const {
  return number(name, min, max,
                max == INT64_MAX ? fmt::format("an integer of at least {}", min)
                                 : fmt::format("an integer from {} to {}", min, max));
}

double CommandLine::real(const std::string& name, double min, double max) const {
  return number(name, min, max, fmt::format("a number from {} to {}", min, max));
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
  std::istringstream examples(command.example);
  for (std::string line; std::getline(examples, line);) out += "  " + line + "\n";
  if (!command.notes.empty()) out += "\n" + command.notes + "\n";
  return out;
}

}  // namespace marrow
