// marrow plan: the picture and what is printed of it.
#include "ops/pch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "base/json.h"
#include "pipeline/action_timer.h"

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

TEST_F(PlanTest, OneRankHasNoBubble) {
  ASSERT_EQ(run("plan run.toml --output plan.svg --set mesh.pp=1 --set train.global_batch=3"), 0) << err();
  EXPECT_NE(out().find("rank 0: layers embedding, 0-47, head; bubble 0.0 %"), std::string::npos) << out();
}

// When each pass began and ended on its rank: key kind of pass, slot, micro-batch.
struct MeasuredPass {
  double start = 0, end = 0;
  bool ends_apart = true;  // no forward of a pair, whose output goes before the pair ends
};
using MeasuredRank = std::map<std::tuple<bool, int64_t, int64_t>, MeasuredPass>;

TEST_F(PlanTest, ATracedRunWritesItsTimelineAndItIsDrawn) {
  std::ofstream(dir_ + "/text.txt") << std::string(3000, 'x');
  ASSERT_EQ(run("tokenize --tokenizer bytes --input text.txt --output tiny"), 0) << err();
  std::ofstream(dir_ + "/tiny.toml") << fmt::format(
      "[model]\nconfig = \"{}/configs/models/qwen3-tiny.json\"\n[data]\ntrain = [\"tiny\"]\nseq_len = 64\n"
      "[mesh]\npp = 2\n[train]\nsteps = 2\nglobal_batch = 8\nmicro_batch = 1\ndevice = \"cpu\"\ncpu_threads = 1\n"
      "[optimizer]\nlr = 1e-3\n[log]\ndir = \"run\"\ntrace = [1, 2]\n",
      MARROW_SOURCE_DIR);
  const std::string plan = "plan run/run.toml --output plan.svg --times ";
  EXPECT_EQ(run("plan tiny.toml --output plan.svg --times ."), 2);
  EXPECT_NE(err().find("holds no timeline-STEP-rank-RANK.json"), std::string::npos) << err();
  ASSERT_EQ(run("pretrain tiny.toml --processes 2"), 0) << err();
  EXPECT_EQ(err().find("ERROR"), std::string::npos) << err();

  // Inputs come from the outputs of other actions, and a rank does one action at a time.
  const PipelineShape shape{PipelineSchedule::kDualPipeV, 2};
  std::vector<MeasuredRank> ranks(2);
  for (int64_t rank = 0; rank < 2; ++rank) {
    const std::vector<TimedAction> actions =
        read_timeline(timeline_path(dir_ + "/run", 2, rank), "pp 2 x dp 1 x cp 1 x ep 1");
    std::vector<PipelineAction> order;
    double free = 0;
    for (const auto& [action, start, end] : actions) {
      order.push_back(action);
      EXPECT_GE(start, free) << to_text(action);
      EXPECT_GT(end, start) << to_text(action);
      free = end;
      const bool pair = action.forward && action.backward;
      if (action.forward) ranks[rank][{true, action.forward.slot, action.forward.micro_batch}] = {start, end, !pair};
      if (!action.backward || action.kind == ActionKind::kWeightGrad) continue;
      ranks[rank][{false, action.backward.slot, action.backward.micro_batch}] = {start, end, true};
    }
    EXPECT_EQ(order, pipeline_actions(shape, rank, 8));
  }
  for (int64_t rank = 0; rank < 2; ++rank) {
    for (const auto& [key, pass] : ranks[rank]) {
      const auto [forward, slot, micro_batch] = key;
      const int64_t source = source_rank(shape, rank, forward, slot);
      if (source < 0) continue;
      const MeasuredPass& input = ranks[source].at({forward, source == rank ? 1 - slot : slot, micro_batch});
      EXPECT_GE(pass.start, input.ends_apart ? input.end : input.start) << rank << " " << slot << " " << micro_batch;
    }
  }

  for (const char* times : {"run", "run/timeline-00000001-rank-0001.json"}) {
    ASSERT_EQ(run(plan + times + " --json"), 0) << err();
    const Json drawn = Json::parse(out(), "out");
    EXPECT_EQ(drawn.at("times").as_string(), "measured");
    EXPECT_GT(drawn.at("bubble_share").as_double(), 0);
    const std::string svg = read_text_file(dir_ + "/plan.svg");
    int64_t actions = 0;
    for (int64_t rank = 0; rank < 2; ++rank) {
      for (const PipelineAction& action : pipeline_actions(shape, rank, 8)) {
        EXPECT_NE(svg.find(fmt::format("<title>rank {}: {}, chunk ", rank, to_text(action))), std::string::npos);
        ++actions;
      }
    }
    EXPECT_EQ(shapes(), actions);
    EXPECT_EQ(drawn.at("actions").as_int(), actions);
  }
  for (const char* other : {"run --set mesh.pp=1", "run --set mesh.cp=2", "run --set mesh.pp=1 --set mesh.cp=2"}) {
    EXPECT_EQ(run(plan + other), 2);
    EXPECT_NE(err().find("rank-0000.json is of the mesh pp 2 x dp 1 x cp 1 x ep 1, "), std::string::npos) << err();
  }
  EXPECT_EQ(run(plan + "run --set train.global_batch=16"), 2);
  EXPECT_NE(err().find("has 16 forwards, the plan 32"), std::string::npos) << err();

  // Anew with one rank: timelines of steps to come are not its own.
  std::filesystem::remove_all(dir_ + "/run/checkpoints");
  ASSERT_EQ(run("pretrain tiny.toml --set mesh.pp=1 --set log.trace=[1]"), 0) << err();
  EXPECT_EQ(run(plan + "run"), 0) << err();
  EXPECT_FALSE(std::filesystem::exists(timeline_path(dir_ + "/run", 1, 1)));
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
  EXPECT_EQ(run("plan run.toml --output p.svg --set train.global_batch=1000000"), 2);
  EXPECT_NE(err().find("fix: set train.global_batch to 16"), std::string::npos) << err();
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/p.svg"));
  EXPECT_EQ(run("plan --help"), 0);
  EXPECT_NE(out().find("example:\n  marrow plan run.toml --output plan.svg"), std::string::npos) << out();
  EXPECT_NE(out().find("--times RUN"), std::string::npos);
}

}  // namespace
}  // namespace marrow
