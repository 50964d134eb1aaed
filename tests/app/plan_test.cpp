// marrow plan: the picture and what is printed of it.
#include "ops/pch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "base/json.h"

namespace marrow {
namespace {

class PlanTest : public testing::Test {
 protected:
  void SetUp() override {
    binary_ = (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "marrow").string();
    dir_ = (std::filesystem::temp_directory_path() / fmt::format("marrow-plan-{}", getpid())).string();
    std::filesystem::create_directories(dir_);
    std::ofstream(dir_ + "/text.txt") << "hello";
    ASSERT_EQ(run("tokenize --tokenizer bytes --input text.txt --output c"), 0) << err();
    std::ofstream(dir_ + "/run.toml") << fmt::format(
        "[model]\nconfig = \"{}/configs/models/qwen3-30b-a3b.json\"\n[data]\ntrain = [\"c\"]\nseq_len = 4096\n"
        "[mesh]\npp = 4\n[train]\nsteps = 1\nglobal_batch = 9\n[optimizer]\nlr = 1e-3\n",
        MARROW_SOURCE_DIR);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  int run(const std::string& words) const {
    return WEXITSTATUS(std::system(fmt::format("cd {} && {} {} >out 2>err", dir_, binary_, words).c_str()));
  }
  std::string out() const { return read_text_file(dir_ + "/out"); }
  std::string err() const { return read_text_file(dir_ + "/err"); }
  int64_t shapes() const {
    const std::string svg = read_text_file(dir_ + "/plan.svg");
    int64_t count = 0;
    for (size_t at = svg.find("<rect "); at != std::string::npos; at = svg.find("<rect ", at + 1)) ++count;
    return count;
  }
  std::string binary_, dir_;
};

TEST_F(PlanTest, EveryActionIsAShapeAndEveryLayerIsPlacedOnce) {
  for (const char* schedule : {"dualpipev", "1f1b"}) {
    ASSERT_EQ(run(fmt::format("plan run.toml --output plan.svg --set mesh.schedule='\"{}\"' --json", schedule)), 0)
        << err();
    const Json plan = Json::parse(out(), "out");
    EXPECT_EQ(plan.at("micro_batches").as_int(), 9);
    EXPECT_EQ(plan.at("actions").as_int(), shapes());
    std::vector<int64_t> layers;
    int64_t actions = 0;
    for (size_t rank = 0; rank < 4; ++rank) {
      const Json line = plan.at("ranks").at(rank);
      actions += line.at("actions").as_int();
      EXPECT_GT(line.at("bubble_share").as_double(), 0);
      for (size_t slot = 0; slot < line.at("layers").size(); ++slot) {
        const Json range = line.at("layers").at(slot);
        for (int64_t l = range.at(0).as_int(); l <= range.at(1).as_int(); ++l) layers.push_back(l);
      }
    }
    EXPECT_EQ(actions, shapes());
    std::sort(layers.begin(), layers.end());
    ASSERT_EQ(layers.size(), 48u);
    for (int64_t l = 0; l < 48; ++l) EXPECT_EQ(layers[l], l);
  }
  EXPECT_EQ(shapes(), 4 * 9 * 2);  // 1F1B: a forward and a backward each
  const std::string svg = read_text_file(dir_ + "/plan.svg");
  EXPECT_NE(svg.find("<title>rank 3: backward(slot 0, micro-batch 8), chunk 3, "), std::string::npos);
}

TEST_F(PlanTest, MeasuredTimesReplaceEstimates) {
  ASSERT_EQ(run("plan run.toml --output plan.svg --set mesh.pp=1 --set train.global_batch=3"), 0) << err();
  EXPECT_NE(out().find("rank 0: layers embedding, 0-47, head; bubble 0.0 %"), std::string::npos) << out();
  std::ofstream(dir_ + "/times.json") << R"({"forward": [1], "backward": [2.5], "pair": [3]})";
  const std::string words =
      "plan run.toml --output plan.svg --set mesh.pp=1 --set train.global_batch=3 --times times.json";
  ASSERT_EQ(run(words + " --json"), 0) << err();
  EXPECT_EQ(Json::parse(out(), "out").at("seconds").as_double(), 1 + 3 + 3 + 2.5);
  std::ofstream(dir_ + "/times.json") << R"({"forward": [1], "backward": [2.5]})";
  EXPECT_EQ(run(words), 3);
  EXPECT_NE(err().find("times.json has no time of forward(slot 0, micro-batch 1) + backward"), std::string::npos)
      << err();
  std::ofstream(dir_ + "/times.json") << R"({"forward": [1, 1]})";
  EXPECT_EQ(run(words), 3);
  EXPECT_NE(err().find("forward has 2 times; this pipeline has 1 chunks"), std::string::npos) << err();
}

TEST_F(PlanTest, RefusesWhatCannotBe) {
  std::ofstream(dir_ + "/plan.svg") << "my own notes";
  EXPECT_EQ(run("plan run.toml --output plan.svg"), 2);
  EXPECT_NE(err().find("plan.svg exists and is no picture of marrow plan"), std::string::npos) << err();
  EXPECT_EQ(read_text_file(dir_ + "/plan.svg"), "my own notes");
  EXPECT_EQ(run("plan run.toml --output p.svg --set mesh.pp=2 --set train.global_batch=3"), 2);
  EXPECT_NE(err().find("at least 2 x mesh.pp = 4 micro-batches"), std::string::npos) << err();
  EXPECT_EQ(run("plan run.toml --output p.svg --set mesh.pp=25 --set train.global_batch=50"), 2);
  EXPECT_NE(err().find("48 layers"), std::string::npos) << err();
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/p.svg"));
  EXPECT_EQ(run("plan --help"), 0);
  EXPECT_NE(out().find("example:\n  marrow plan run.toml --output plan.svg"), std::string::npos) << out();
  EXPECT_NE(out().find("TIMES.json"), std::string::npos);
}

}  // namespace
}  // namespace marrow
