#include "app/command_line.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <sstream>

namespace marrow {
namespace {

std::vector<Option> with_common_options(std::vector<Option> options) {
  options.push_back({"[--json]", "print the result as one JSON object"});
  options.push_back({"[--help]", "print this page"});
  return options;
}

}  // namespace

std::string Option::bare() const { return required() ? form : form.substr(1, form.find(']') - 1); }

std::string Option::name() const { return bare().substr(2, bare().find(' ') - 2); }

std::string Option::value() const {
  const std::string text = bare().substr(std::min(name().size() + 3, bare().size()));
  return many() ? text.substr(0, text.size() - 3) : text;
}

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
  logger_.set_quiet(has("json"));
}

// Reads the option at words[at] with its values; returns the index after them.
size_t CommandLine::take_option(const std::vector<std::string>& words, size_t at) {
  std::vector<std::string> names;
  for (const Option& option : options_) names.push_back("--" + option.name());
  const auto find = [&](const std::string& word) {
    return std::find(names.begin(), names.end(), word.substr(0, word.find('='))) - names.begin();
  };
  const std::string word = words[at] == "-h" ? "--help" : words[at];
  const size_t equals = word.find('='), known = static_cast<size_t>(find(word));
  const std::string dashed = word.substr(0, equals);
  if (known == names.size()) {
    const std::string nearest = nearest_match(dashed, names);
    MARROW_THROW(ExitCode::kUsage,
                 nearest.empty() ? Fix("see marrow {} --help; a value that begins with dashes is written --NAME={}",
                                       command_.name, word)
                                 : Fix("did you mean {}?", nearest),
                 "marrow {} has no option {}", command_.name, dashed);
  }
  const Option& option = options_[known];
  const std::string wanted = option.value();
  const bool once = !wanted.empty() && !option.repeated() && !option.many();
  MARROW_CHECK(!once || !has(option.name()), ExitCode::kUsage, Fix("give {} once", dashed), "{} is given twice",
               dashed);
  std::vector<std::string>& values = values_[option.name()];
  ++at;
  if (wanted.empty()) {
    MARROW_CHECK(equals == std::string::npos, ExitCode::kUsage, Fix("write {} alone", dashed),
                 "{} takes no value, but {} is given", dashed, json_quote(word.substr(equals + 1)));
    return at;
  }
  const size_t before = values.size();
  if (equals != std::string::npos) {
    values.push_back(word.substr(equals + 1));
  } else if (option.many()) {
    while (at < words.size() && !words[at].starts_with("--")) values.push_back(words[at++]);
  } else if (at < words.size() && static_cast<size_t>(find(words[at])) == names.size()) {
    values.push_back(words[at++]);
  }
  MARROW_CHECK(values.size() > before, ExitCode::kUsage,
               Fix("write {} (one that looks like an option: {}=--name)", option.bare(), dashed), "{} needs a value",
               dashed);
  const bool any = std::any_of(wanted.begin(), wanted.end(), [](char c) { return c >= 'A' && c <= 'Z'; });
  for (size_t i = before; i < values.size(); ++i) {
    MARROW_CHECK(!values[i].empty() || wanted == "TEXT", ExitCode::kUsage, Fix("write {}", option.bare()),
                 "{} is given an empty value", dashed);
    MARROW_CHECK(any || ("|" + wanted + "|").find("|" + values[i] + "|") != std::string::npos, ExitCode::kUsage,
                 Fix("write {}", option.bare()), "{} is {}, not one of {}", dashed, json_quote(values[i]), wanted);
  }
  return at;
}

void CommandLine::check_complete() const {
  for (const auto& [name, values] : values_) {
    if (name.starts_with("help")) return;
  }
  const Fix see_help("see marrow {} --help", command_.name);
  const size_t wanted = command_.positionals.size(), given = positionals_.size();
  MARROW_CHECK(given >= wanted, ExitCode::kUsage, see_help, "marrow {} needs {} argument{} ({}), {} given",
               command_.name, wanted, wanted == 1 ? "" : "s", fmt::join(command_.positionals, " "), given);
  MARROW_CHECK(given == wanted, ExitCode::kUsage, see_help, "marrow {} takes {} argument{}, but {} is given more",
               command_.name, wanted, wanted == 1 ? "" : "s", json_quote(positionals_[wanted]));
  for (size_t i = 0; i < wanted; ++i) {
    MARROW_CHECK(!positionals_[i].empty(), ExitCode::kUsage, see_help, "{} is given as an empty path",
                 command_.positionals[i]);
  }
  for (const Option& option : options_) {
    MARROW_CHECK(!option.required() || has(option.name()), ExitCode::kUsage, Fix("add {}", option.bare()),
                 "marrow {} needs --{}", command_.name, option.name());
  }
}

std::string CommandLine::text(const std::string& name) const {
  if (has(name)) return values_.at(name).front();
  for (const Option& option : options_) {
    if (option.name() == name) return option.fallback;
  }
  MARROW_THROW(ExitCode::kUsage, Fix("declare --{} in the subcommand's file", name),
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
               Fix("give --{} {}", name, range), "--{} is {}, not {}", name, json_quote(given), range);
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

void CommandLine::print(const std::string& text, JsonWriter json) const {
  if (!logger_.warnings().empty()) json.field("warnings", logger_.warnings());
  const std::string out = has("json") ? json.text() : text;
  fmt::print("{}{}", out, out.ends_with('\n') ? "" : "\n");
  std::fflush(stdout);
}

std::string help_text(const Subcommand& command) {
  std::string usage = fmt::format("marrow {} {}", command.name, fmt::join(command.positionals, " "));
  std::string table;
  for (const Option& option : with_common_options(command.options)) {
    usage += " " + option.form;
    table += fmt::format("  {:<28}  {}", option.bare(), option.help);
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
