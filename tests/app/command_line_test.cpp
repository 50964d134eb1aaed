#include "ops/pch.h"

#include "app/command_line.h"

#include <gtest/gtest.h>

namespace marrow {
namespace {

Subcommand sample() {
  return {.name = "sample",
          .summary = "what it does",
          .positionals = {"RUN.toml"},
          .options = {{.name = "output", .takes = Takes::kOne, .value = "PATH", .help = "where to", .required = true},
                      {.name = "workers", .takes = Takes::kOne, .value = "N", .fallback = "4"},
                      {.name = "rate", .takes = Takes::kOne, .value = "R", .fallback = "0.5"},
                      {.name = "set", .takes = Takes::kRepeated, .value = "KEY=VALUE"},
                      {.name = "input", .takes = Takes::kMany, .value = "PATH"},
                      {.name = "on-error", .takes = Takes::kOne, .fallback = "stop", .choices = {"skip", "stop"}},
                      {.name = "overwrite"},
                      {.name = "help-config", .alone = true}},
          .example = "marrow sample run.toml --output x\nmarrow sample --help-config"};
}

TEST(CommandLine, ReadsEveryForm) {
  const Subcommand command = sample();
  const CommandLine args(command, {"run.toml", "--output=a=b", "--set", "x=1", "--workers", "-2", "--set=y=2",
                                   "--overwrite", "--json", "--input", "p", "q"});
  EXPECT_EQ(args.positional(), "run.toml");
  EXPECT_EQ(args.text("output"), "a=b");
  EXPECT_EQ(args.integer("workers", -5), -2);
  EXPECT_EQ(args.real("rate", 0, 1), 0.5);
  EXPECT_EQ(args.list("set"), (std::vector<std::string>{"x=1", "y=2"}));
  EXPECT_EQ(args.list("input"), (std::vector<std::string>{"p", "q"}));
  EXPECT_EQ(args.text("on-error"), "stop");
  EXPECT_TRUE(args.flag("overwrite"));
  EXPECT_TRUE(args.json());
  EXPECT_FALSE(args.help());
}

TEST(CommandLine, HelpAndAloneOptionsNeedNothingBesideThem) {
  const Subcommand command = sample();
  EXPECT_TRUE(CommandLine(command, {"--help"}).help());
  EXPECT_TRUE(CommandLine(command, {"-h"}).help());
  EXPECT_TRUE(CommandLine(command, {"--help-config"}).flag("help-config"));
}

TEST(CommandLine, FaultsNameTheWordAndTheFix) {
  struct Case {
    std::vector<std::string> words;
    std::string what, fix;
  };
  const std::vector<Case> cases = {
      {{"r", "--outptu", "x"}, "marrow sample has no option --outptu", "did you mean --output?"},
      {{"r", "--zzzzzzzzzz"}, "no option --zzzzzzzzzz", "marrow sample --help"},
      {{"r", "-x"}, "no option -x", ""},
      {{"r"}, "marrow sample needs --output", "add --output PATH"},
      {{"--output", "x"}, "needs 1 argument (RUN.toml), 0 given", "marrow sample --help"},
      {{"a", "b", "--output", "x"}, "but \"b\" is given more", "marrow sample --help"},
      {{"r", "--output"}, "--output needs a value", "write --output PATH"},
      {{"r", "--output", "--json"}, "--output needs a value", "write --output PATH"},
      {{"r", "--output", "x", "--output", "y"}, "--output is given twice", "give --output once"},
      {{"r", "--output", "x", "--overwrite=1"}, "--overwrite takes no value", "alone"},
      {{"r", "--output", "x", "--on-error", "go"},
       "--on-error is \"go\", not one of skip, stop",
       "write --on-error skip|stop"},
  };
  const Subcommand command = sample();
  for (const Case& c : cases) {
    try {
      const CommandLine args(command, c.words);
      FAIL() << c.what;
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kUsage);
      EXPECT_NE(error.report().what.find(c.what), std::string::npos) << error.report().what;
      EXPECT_NE(error.report().fix.find(c.fix), std::string::npos) << error.report().fix;
    }
  }
}

TEST(CommandLine, NumbersAreCheckedWhole) {
  const Subcommand command = sample();
  for (const char* word : {"x", "3x", "", "99999999999999999999", "1.5", "-1"}) {
    const CommandLine args(command, {"r", "--output=o", fmt::format("--workers={}", word)});
    EXPECT_THROW(args.integer("workers", 0), Error) << word;
  }
  for (const char* word : {"x", "nan", "2", "0.5x"}) {
    const CommandLine args(command, {"r", "--output=o", fmt::format("--rate={}", word)});
    EXPECT_THROW(args.real("rate", 0, 1), Error) << word;
  }
}

TEST(CommandLine, HelpShowsUsageDefaultsAndExample) {
  const std::string text = help_text(sample());
  for (const char* part :
       {"usage: marrow sample RUN.toml --output PATH", "(default: 4)", "[--set KEY=VALUE][...]", "--input PATH...",
        "--on-error skip|stop", "--json", "example:\n  marrow sample run.toml --output x\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

}  // namespace
}  // namespace marrow
