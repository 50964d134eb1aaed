// The binary itself: exit codes, where its output goes, and the environment it runs in.
#include "ops/pch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "base/json.h"

namespace marrow {
namespace {

struct Outcome {
  int code = 0;
  std::string out, err;
};

class BinaryTest : public testing::Test {
 protected:
  void SetUp() override {
    binary_ = (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "marrow").string();
    ASSERT_TRUE(std::filesystem::exists(binary_)) << "build the target marrow first";
    dir_ = (std::filesystem::temp_directory_path() / fmt::format("marrow-binary-{}", getpid())).string();
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Runs `marrow WORDS` in a shell, without the OpenMP variables that the tests run under.
  Outcome run(const std::string& words, const std::string& environment = "") const {
    const std::string command = fmt::format("cd {0} && env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT {1} {2} {3} >out 2>err",
                                            dir_, environment, binary_, words);
    const int status = std::system(command.c_str());
    return {WEXITSTATUS(status), read_text_file(dir_ + "/out"), read_text_file(dir_ + "/err")};
  }
  std::string binary_, dir_;
};

TEST_F(BinaryTest, OpenMpWaitsPassivelyAndTheUsersChoiceWins) {
  const Outcome bare = run("doctor", "OMP_DISPLAY_ENV=verbose");
  EXPECT_NE(bare.err.find("GOMP_SPINCOUNT = '0'"), std::string::npos) << bare.err;
  EXPECT_NE(bare.err.find("OMP_WAIT_POLICY = 'PASSIVE'"), std::string::npos);
  const Outcome chosen = run("doctor", "OMP_DISPLAY_ENV=verbose OMP_WAIT_POLICY=active");
  EXPECT_NE(chosen.err.find("OMP_WAIT_POLICY = 'ACTIVE'"), std::string::npos) << chosen.err;
}

TEST_F(BinaryTest, DoctorEndsWithAVerdict) {
  const Outcome text = run("doctor");
  const size_t last = text.out.rfind('\n', text.out.size() - 2) + 1;
  const std::string verdict = text.out.substr(last, 4);
  EXPECT_EQ(verdict, text.code == 0 ? "PASS" : "FAIL");
  const Outcome json = run("doctor --json");
  EXPECT_EQ(json.code, text.code);
  EXPECT_EQ(Json::parse(json.out, "out").at("pass").as_bool(), text.code == 0);
}

TEST_F(BinaryTest, EverySubcommandHasHelpWithAnExample) {
  for (const char* name :
       {"tokenize", "pretrain", "eval", "generate", "export", "import", "inspect", "report", "doctor"}) {
    const Outcome help = run(fmt::format("{} --help", name));
    EXPECT_EQ(help.code, 0) << name;
    EXPECT_NE(help.out.find(fmt::format("example:\n  marrow {}", name)), std::string::npos) << name;
    EXPECT_NE(help.out.find("--json"), std::string::npos) << name;
  }
}

TEST_F(BinaryTest, UsageFaultsExitWith2OnStandardError) {
  for (const char* words : {"", "pretrian x.toml", "pretrain", "doctor extra", "doctor --jsn", "inspect nowhere",
                            "report nowhere", "pretrain nowhere.toml"}) {
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 2) << words;
    EXPECT_EQ(outcome.out, "") << words;
    EXPECT_NE(outcome.err, "") << words;
  }
  EXPECT_NE(run("pretrian x").err.find("did you mean marrow pretrain?"), std::string::npos);
}

TEST_F(BinaryTest, JsonErrorsAreOneLineOnStandardError) {
  const Outcome outcome = run("inspect nowhere --json");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1);
  const Json error = Json::parse(outcome.err, "err").at("error");
  EXPECT_EQ(error.at("what").as_string(), "nowhere does not exist");
  for (const char* key : {"where", "tensors", "who", "fix"}) EXPECT_TRUE(error.has(key)) << key;
}

TEST_F(BinaryTest, InspectTellsWhatAPathIs) {
  std::ofstream(dir_ + "/text.txt") << "hello";
  ASSERT_EQ(run("tokenize --tokenizer bytes --input text.txt --output c").code, 0);
  for (const char* path : {"c", "c.idx", "c.bin"}) {
    const Outcome outcome = run(fmt::format("inspect {} --json", path));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const Json facts = Json::parse(outcome.out, "out");
    EXPECT_EQ(facts.at("kind").as_string(), "corpus");
    EXPECT_EQ(facts.at("documents").as_int(), 1);
    EXPECT_EQ(facts.at("tokens").as_int(), 6);  // and the end of the document
    EXPECT_EQ(facts.at("tokenizer").as_string(), "bytes");
  }
  const Json tokenizer = Json::parse(run("inspect bytes --json").out, "out");
  EXPECT_EQ(tokenizer.at("kind").as_string(), "tokenizer");
  EXPECT_EQ(tokenizer.at("vocab_size").as_int(), 257);
  std::filesystem::create_directories(dir_ + "/empty");
  EXPECT_EQ(run("inspect empty").code, 2);
}

}  // namespace
}  // namespace marrow
