#include "base/toml.h"

#include <gtest/gtest.h>

namespace marrow {
namespace {

TEST(Toml, KeysAndValuesKnowTheirPlaces) {
  const TomlValue root = parse_toml("a = 1\n[b]\nz = \"x\"\nc = [true, 2.5,\n  {d = 7}]\n", "f");
  ASSERT_EQ(root.items.size(), 2u);
  EXPECT_EQ(root.items[0].where, "f:1:5");
  EXPECT_EQ(root.items[0].integer, 1);
  EXPECT_EQ(root.items[0].real, 1.0);
  const TomlValue& b = root.items[1];
  ASSERT_EQ(b.items.size(), 2u);
  EXPECT_EQ(b.items[0].key, "z");  // the order of the file, not of the alphabet
  EXPECT_EQ(b.items[0].key_where, "f:3:1");
  const TomlValue& list = b.items[1];
  ASSERT_EQ(list.items.size(), 3u);
  EXPECT_TRUE(list.items[0].boolean);
  EXPECT_EQ(list.items[1].real, 2.5);
  EXPECT_EQ(list.items[2].find("d")->where, "f:5:8");
  EXPECT_EQ(root.find("q"), nullptr);
}

TEST(Toml, FaultsNameThePlace) {
  for (const auto& [text, place] : {std::pair("a = 1\na = 2\n", "f:2:"),
                                    {"a = [1,\n  ?]", "f:2:3"},
                                    {"x\n", "f:1:"},
                                    {"a = \"\\q\"", "f:1:"},
                                    {"a = 99999999999999999999", "f:1:"},
                                    {"a = \xff", "f:1:"}}) {
    try {
      parse_toml(text, "f");
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kUsage);
      EXPECT_TRUE(error.report().what.starts_with(place)) << error.report().what;
    }
  }
}

TEST(Toml, OverridesReplaceOrAdd) {
  TomlValue root = parse_toml("[train]\nsteps = 3\n", "f");
  override_toml(root, "train.steps=4");
  override_toml(root, "log.dir=a/b=c");
  override_toml(root, "x=[1, 2]");
  EXPECT_EQ(root.find("train")->find("steps")->integer, 4);
  EXPECT_EQ(root.find("train")->find("steps")->where, "--set train.steps");
  EXPECT_EQ(root.find("train")->items.size(), 1u);
  EXPECT_EQ(root.find("log")->find("dir")->text, "a/b=c");
  EXPECT_EQ(root.find("x")->items.at(1).where, "--set x");
}

TEST(Toml, QuotedTextReadsBack) {
  std::string text;
  for (int byte = 1; byte < 128; ++byte) text += static_cast<char>(byte);
  text += "\xC3\xA9\xF0\x9F\x98\x80";
  EXPECT_EQ(parse_toml("a = " + toml_quote(text), "f").find("a")->text, text);
}

}  // namespace
}  // namespace marrow
