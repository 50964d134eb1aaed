// marrow estimate: against measured memory, and what holds between the ranks of any mesh.
#include "ops/pch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "base/json.h"
#include "ops/linear_cross_entropy.h"
#include "train/memory_estimate.h"

namespace marrow {
namespace {

const ModelShape kAnyModel{.layers = INT64_MAX};  // fits every mesh

class EstimateTest : public testing::Test {
 protected:
  void SetUp() override {
    binary_ = (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "marrow").string();
    dir_ = (std::filesystem::temp_directory_path() / fmt::format("marrow-estimate-{}", getpid())).string();
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Of Qwen3-30B-A3B's width with 4 layers, 32 sequences of 4,096 a step; no corpus is there.
  PretrainConfig config(const std::vector<std::string>& set) const {
    std::vector<std::string> all = {
        fmt::format("model.config=\"{}/configs/models/qwen3-30b-a3b-4layers.json\"", MARROW_SOURCE_DIR)};
    all.insert(all.end(), set.begin(), set.end());
    PretrainConfig config =
        read_pretrain_config(MARROW_SOURCE_DIR "/configs/runs/gpu-30b-4layers.toml", all, true, false);
    const auto& mesh = config.mesh;
    resolve_mesh(config, mesh.pp * std::max<int64_t>(mesh.dp, 1) * mesh.cp * mesh.ep,
                 kAnyModel);  // dp: "auto" by default
    return config;
  }
  static std::unique_ptr<MoeModel> model(const PretrainConfig& config) {
    return open_model(Json::read_file(config.model.config));
  }
  RunEstimate estimate(const std::vector<std::string>& set) const {
    const PretrainConfig planned = config(set);
    return estimate_run(*model(planned), planned);
  }
  int run(const std::string& words) const {
    return WEXITSTATUS(std::system(fmt::format("cd {} && {} estimate {}/configs/runs/gpu-30b-4layers.toml "
                                               "--set 'model.config=\"{}/configs/models/qwen3-30b-a3b-4layers.json\"' "
                                               "--set 'data.train=[\"missing\"]' {} >{}/out 2>{}/err",
                                               dir_, binary_, MARROW_SOURCE_DIR, MARROW_SOURCE_DIR, words, dir_, dir_)
                                       .c_str()));
  }
  std::string out() const { return read_text_file(dir_ + "/out"); }
  std::string err() const { return read_text_file(dir_ + "/err"); }
  std::string binary_, dir_;
};

TEST_F(EstimateTest, ManyMicroBatchesNeedNoWalkThroughAll) {
  const auto with = [&](int64_t batch) {
    return estimate({"train.micro_batch=1", "mesh.pp=2", fmt::format("train.global_batch={}", batch)});
  };
  const RunEstimate fewer = with(14), few = with(16), huge = with(1 << 24);
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(huge.ranks[rank].activations, few.ranks[rank].activations);
  const double longer = 0.5 * (few.step_seconds - fewer.step_seconds) * ((1 << 24) - 16);
  EXPECT_GT(longer, 0);
  EXPECT_NEAR(huge.step_seconds, few.step_seconds + longer, 1e-6 * longer);
}

// "memory held by the allocator" on one H200, in docs/benchmarks.md.
TEST_F(EstimateTest, AgreesWithMeasuredMemory) {
  const std::pair<std::vector<std::string>, double> measured[] = {
      {{"train.micro_batch=1"}, 60.0e9},
      {{"train.micro_batch=2"}, 61.5e9},
      {{"train.micro_batch=4"}, 67.9e9},
      {{"train.micro_batch=8"}, 76.4e9},
      {{"train.micro_batch=4", "optimizer.state_dtype=\"bf16\""}, 54.7e9},
      {{"train.micro_batch=4", "train.recompute=\"cheap\""}, 63.4e9},
      {{"train.micro_batch=4", "train.recompute=\"layer\""}, 61.7e9}};
  for (const auto& [set, bytes] : measured) {
    const RankMemory rank = estimate(set).ranks[0];
    const double held = static_cast<double>(rank.total() - rank.outside);
    EXPECT_NEAR(held, bytes, 0.10 * bytes) << set.back();
    EXPECT_NEAR(held, bytes, 0.03 * bytes) << set.back() << ": as it was fitted";
  }
  // 131,072 tokens at 133,500 tokens a second; exchanges and update are not in the estimate.
  const double seconds = estimate({"train.micro_batch=4"}).step_seconds;
  EXPECT_NEAR(seconds, 131072 / 133500.0, 0.15 * seconds);
}

TEST_F(EstimateTest, ParametersAreWhatTheStoreHoldsAndSumUpToTheModel) {
  int64_t elements = 0;
  const PretrainConfig one = config({});
  for (const ParameterSpec& spec : all_parameter_specs(*model(one))) {
    for (const HubTensor& part : spec.parts) elements += part.elements();
  }
  const RankMemory whole = estimate({}).ranks[0];
  const auto near = [](int64_t value, int64_t expected) {
    EXPECT_GE(value, expected);
    EXPECT_LE(value, expected + expected / 1000);  // tensors and shards are padded
  };
  near(whole.parameters, 6 * elements);
  near(whole.gradients, 4 * elements);
  near(whole.optimizer, 8 * elements);
  near(whole.save_copy, 12 * elements);
  int64_t matrices = 0;  // copies in fp8 both ways round
  for (const ParameterSpec& spec : all_parameter_specs(*model(one))) {
    for (const HubTensor& part : spec.parts) matrices += spec.rule == UpdateRule::kMuon ? part.elements() : 0;
  }
  near(estimate({"train.dtype=\"fp8\""}).ranks[0].parameters, 6 * elements + 2 * matrices);
  EXPECT_EQ(estimate({"train.dtype=\"fp8\""}).ranks[0].optimizer, whole.optimizer);
  const std::vector<std::string> meshes[] = {
      {"mesh.pp=2"},
      {"mesh.dp=4"},
      {"mesh.ep=4"},
      {"mesh.cp=2"},
      {"train.micro_batch=1", "mesh.pp=2", "mesh.dp=2", "mesh.cp=2", "mesh.ep=2"},
      {"mesh.dp=4", "optimizer.name=\"muon\""},
      {"mesh.dp=4", "mesh.shard=\"layer\""}};
  for (const auto& set : meshes) {
    const RunEstimate parts = estimate(set);
    int64_t masters_and_states = 0, optimizer = 0;
    for (const RankMemory& rank : parts.ranks) {
      masters_and_states += rank.save_copy;
      optimizer += rank.optimizer;
      EXPECT_LT(rank.activations, whole.activations * 2);
    }
    near(masters_and_states - optimizer, 4 * elements);
    if (set.back() == "optimizer.name=\"muon\"") {
      EXPECT_LT(optimizer, 6 * elements);  // matrices have no second moment
    } else {
      near(optimizer, 8 * elements);
    }
  }
}

// Where weight gradients of experts are in fp8, their rows are kept so, a byte an element, and not made again.
TEST_F(EstimateTest, RowsOfExpertsInFp8AreKept) {
  std::vector<std::string> set = {"train.micro_batch=4", "train.recompute=\"cheap\"", "train.dtype=\"fp8\""};
  const int64_t without = estimate(set).ranks[0].activations;  // 1,024 rows an expert are few
  set.emplace_back("train.fp8_at_any_size=true");
  const int64_t rows = 4 * 4096 * 8, kept = estimate(set).ranks[0].activations - without;
  EXPECT_EQ(kept, 3 * rows * (2048 + 768));  // of four layers the last one's are read when most is held
}

// Whole published models, 32 ranks: what the ranks hold adds up to the model.
TEST_F(EstimateTest, TakesTheOtherFamilies) {
  const std::pair<std::string, int64_t> published[] = {{"deepseek-v2-lite", 15'706'484'224},
                                                       {"moonlight-16b-a3b", 15'960'110'208 - 26 * 64},
                                                       {"qwen3.5-35b-a3b", 34'660'610'688}};
  for (const auto& [name, parameters] : published) {
    SCOPED_TRACE(name);
    const RunEstimate parts =
        estimate({fmt::format("model.config=\"{}/configs/models/{}.json\"", MARROW_SOURCE_DIR, name),
                  "train.micro_batch=1", "mesh.pp=2", "mesh.cp=2", "mesh.ep=8"});
    int64_t masters = 0, largest = 0;
    for (const RankMemory& rank : parts.ranks) {
      masters += rank.save_copy - rank.optimizer;
      largest = std::max(largest, rank.total());
    }
    EXPECT_NEAR(masters, 4 * parameters, 4e-3 * parameters);
    EXPECT_LT(largest, 141e9);
    EXPECT_GT(parts.step_seconds, 0.0);
  }
  EXPECT_EQ(run(fmt::format("--set 'model.config=\"{}/configs/models/deepseek-v2-lite.json\"'", MARROW_SOURCE_DIR)), 0);
}

TEST_F(EstimateTest, EachDimensionDividesWhatItShould) {
  const RankMemory one = estimate({}).ranks[0];
  const RankMemory dp = estimate({"mesh.dp=4"}).ranks[3];
  EXPECT_NEAR(dp.optimizer, one.optimizer / 4, one.optimizer * 1e-3);  // states shard, activations do not
  EXPECT_EQ(dp.gradients, one.gradients);
  EXPECT_EQ(dp.activations, one.activations);
  const RunEstimate copies = estimate({"mesh.dp=4", "mesh.replicate=2"});
  EXPECT_NEAR(copies.ranks[0].optimizer, one.optimizer / 2, one.optimizer * 1e-3);
  EXPECT_GT(copies.ranks[1].save_copy, 0);
  EXPECT_EQ(copies.ranks[2].save_copy, 0);  // the other replica
  const RankMemory layers = estimate({"mesh.dp=4", "mesh.shard=\"layer\""}).ranks[0];
  EXPECT_NEAR(layers.gradients, one.gradients / 4, one.gradients * 1e-3);
  EXPECT_LT(layers.total(), dp.total());
  const RankMemory cp = estimate({"mesh.cp=4"}).ranks[0];
  // Of both as many rows of logits exist at a time.
  const int64_t vocabulary = 151936, logits = cross_entropy_rows(4096, vocabulary, false) * vocabulary * 2;
  EXPECT_EQ(cross_entropy_rows(4 * 4096, vocabulary, false), 4096);
  EXPECT_LT(cp.activations - logits, (one.activations - logits) / 3);
  const RankMemory ep = estimate({"mesh.ep=8"}).ranks[0];
  EXPECT_LT(ep.gradients, one.gradients / 2);
  EXPECT_LT(ep.activations, one.activations * 3 / 2);  // even routing; a layer more, for the pair
  const RankMemory recomputed = estimate({"train.recompute=\"layer\""}).ranks[0];
  EXPECT_LT(recomputed.activations, one.activations / 2);
  const RankMemory cheap = estimate({"train.recompute=\"cheap\""}).ranks[0];
  EXPECT_LT(cheap.activations, one.activations * 3 / 4);
  EXPECT_LT(recomputed.activations, cheap.activations);

  // A pipeline holds more micro-batches of fewer layers: of 2·pp + 1 passes' chunks, or of pp − rank with 1F1B.
  const auto live = [&](const std::string& schedule) {
    return estimate({"mesh.pp=2", "train.micro_batch=1", fmt::format("mesh.schedule=\"{}\"", schedule)}).ranks;
  };
  const ActivationBytes each = model(config({}))->activation_bytes(0, 2);
  const int64_t layer = 4096 * (each.token + 8 * (each.expert_row + 2 * 2048));
  for (const RankMemory& rank : live("dualpipev")) {
    EXPECT_GT(rank.activations, 4 * layer);
    EXPECT_LT(rank.activations, 8 * layer);
  }
  EXPECT_GT(live("1f1b")[0].activations, live("1f1b")[1].activations);
}

TEST_F(EstimateTest, PrintsATableAndAdviceAndRefusesNothing) {
  ASSERT_EQ(run("--json --memory-gb 80"), 0) << err();
  Json json = Json::parse(out(), "out");
  EXPECT_TRUE(json.at("fits").as_bool());
  const Json rank = json.at("ranks").at(0);
  int64_t sum = 0;
  for (const char* part : {"parameters", "gradients", "optimizer", "activations", "buffers"}) {
    EXPECT_GT(rank.at(part).as_int(), 0) << part;
    sum += rank.at(part).as_int();
  }
  EXPECT_EQ(rank.at("total").as_int(), sum);
  EXPECT_EQ(rank.at("rank").as_int(), 0);

  ASSERT_EQ(run("--memory-gb 20 --set mesh.pp=2 --set mesh.ep=2 --set train.micro_batch=2"), 0) << err();
  EXPECT_NE(out().find("\n0-1 "), std::string::npos) << out();
  EXPECT_NE(out().find("\n2-3 "), std::string::npos) << out();
  EXPECT_NE(out().find("\ndoes not fit: "), std::string::npos) << out();
  for (const char* change :
       {"train.micro_batch = 1: ", "train.recompute = \"cheap\": ", "train.recompute = \"layer\": ",
        "optimizer.state_dtype = \"bf16\": ", "all of these: ", "twice mesh.dp: "}) {
    EXPECT_NE(out().find(change), std::string::npos) << change << out();
  }
  EXPECT_EQ(out().find("mesh.shard"), std::string::npos) << out();  // no help on few ranks with few layers
  ASSERT_EQ(run("--memory-gb 30 --set mesh.dp=8"), 0) << err();
  EXPECT_NE(out().find("mesh.shard = \"layer\": "), std::string::npos) << out();
  ASSERT_EQ(run("--json --memory-gb 20 --processes 8"), 0) << err();  // data parallel: no size is given
  json = Json::parse(out(), "out");
  EXPECT_EQ(json.at("ranks").size(), 8u);
  EXPECT_FALSE(json.at("fits").as_bool());
  EXPECT_EQ(run("--set mesh.pp=5"), 2);  // 4 layers
  EXPECT_EQ(run("--processes 1000000000000"), 2);
  EXPECT_NE(err().find("a plan of 1000000000000 processes"), std::string::npos) << err();
  EXPECT_EQ(run("--set mesh.ep=3 --set train.global_batch=12"), 2);
  EXPECT_NE(err().find("do not divide by mesh.ep = 3"), std::string::npos) << err();
}

}  // namespace
}  // namespace marrow
