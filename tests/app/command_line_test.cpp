#include "ops/pch.h"

#include "app/command_line.h"

#include <gtest/gtest.h>

namespace marrow {
namespace {

Subcommand sample() {
  return {.name = "sample",
          .summary = "what it does",
          .positionals = {"RUN.toml"},
          .options = {{"--output PATH", "where to"},
                      {"[--workers N]", "", "4"},
                      {"[--rate R]", "", "0.5"},
                      {"[--set KEY=VALUE]...", ""},
                      {"[--input PATH...]", ""},
                      {"[--on-error skip|stop]", "", "stop"},
                      {"[--prompt TEXT]", ""},
                      {"[--overwrite]", ""},
                      {"[--help-config]", ""}},
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
  EXPECT_TRUE(args.has("overwrite"));
  EXPECT_TRUE(args.has("json"));
  EXPECT_FALSE(args.has("help"));
}

TEST(CommandLine, ValuesMayBeginWithDashesOrBeEmptyText) {
  const Subcommand command = sample();
  const auto prompt = [&](const std::vector<std::string>& words) {
    std::vector<std::string> all = {"r", "--output", "o"};
    all.insert(all.end(), words.begin(), words.end());
    return CommandLine(command, all).text("prompt");
  };
  EXPECT_EQ(prompt({"--prompt", "--x"}), "--x");
  EXPECT_EQ(prompt({"--prompt", "--x=1"}), "--x=1");
  EXPECT_EQ(prompt({"--prompt=--x"}), "--x");
  EXPECT_EQ(prompt({"--prompt", "-h"}), "-h");
  EXPECT_EQ(prompt({"--prompt", "---"}), "---");
  EXPECT_EQ(prompt({"--prompt=--json"}), "--json");  // an option's name needs the =
  EXPECT_EQ(prompt({"--prompt", ""}), "");
  EXPECT_EQ(prompt({"--prompt="}), "");
}

TEST(CommandLine, UnderJsonWarningsAreKeptForTheResult) {
  const Subcommand command = sample();
  const CommandLine args(command, {"r", "--output", "o", "--json"});
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  args.logger().info("told");
  args.logger().warn("odd");
  args.print("text", JsonWriter().field("a", 1));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "{\"a\": 1, \"warnings\": [\"odd\"]}\n");
  const CommandLine plain(command, {"r", "--output", "o"});
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  plain.logger().warn("odd");
  plain.print("text", JsonWriter().field("a", 1));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "warning: odd\n");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "text\n");
}

TEST(CommandLine, HelpAndAloneOptionsNeedNothingBesideThem) {
  const Subcommand command = sample();
  EXPECT_TRUE(CommandLine(command, {"--help"}).has("help"));
  EXPECT_TRUE(CommandLine(command, {"-h"}).has("help"));
  EXPECT_TRUE(CommandLine(command, {"--help-config"}).has("help-config"));
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
      {{"r", "--output", "--json"}, "--output needs a value", "--output=--name"},
      {{"r", "--output", "x", "--prompt", "--workers=1"}, "--prompt needs a value", "--prompt=--name"},
      {{"r", "--input", "--zzzzzzzzzz"}, "--input needs a value", "--input=--name"},
      {{"r", "--input", "a", "--zzzzzzzzzz"}, "no option --zzzzzzzzzz", "--NAME=--zzzzzzzzzz"},
      {{"r", "--output", ""}, "--output is given an empty value", "write --output PATH"},
      {{"r", "--output="}, "--output is given an empty value", "write --output PATH"},
      {{"r", "--output", "x", "--input", "a", ""}, "--input is given an empty value", "write --input PATH..."},
      {{"", "--output", "x"}, "RUN.toml is given as an empty path", "marrow sample --help"},
      {{"r", "--output", "x", "--output", "y"}, "--output is given twice", "give --output once"},
      {{"r", "--output", "x", "--overwrite=1"}, "--overwrite takes no value", "alone"},
      {{"r", "--output", "x", "--on-error", "go"},
       "--on-error is \"go\", not one of skip|stop",
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
  for (const char* word : {"x", "3x", "99999999999999999999", "1.5", "-1"}) {
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
       {"usage: marrow sample RUN.toml --output PATH", "(default: 4)", "[--set KEY=VALUE]...", "[--input PATH...]",
        "--on-error skip|stop", "--json", "example:\n  marrow sample run.toml --output x\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

}  // namespace
}  // namespace marrow
