#include "ops/pch.h"

#include "train/pretrain_config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <regex>

namespace marrow {
namespace {

const ModelShape kAnyModel{.layers = INT64_MAX};  // fits every mesh

// A folder with a config.json, two corpora and run.toml, as the working folder of one test.
class ConfigTest : public testing::Test {
 protected:
  void SetUp() override {
    home_ = std::filesystem::current_path();
    folder_ = std::filesystem::temp_directory_path() / fmt::format("marrow-config-{}", getpid());
    std::filesystem::create_directories(folder_);
    std::filesystem::current_path(folder_);
    for (const char* file : {"m.json", "c.bin", "c.idx", "v.bin", "v.idx", "half.bin"}) {
      std::ofstream(file) << "{}";
    }
  }
  void TearDown() override {
    std::filesystem::current_path(home_);
    std::filesystem::remove_all(folder_);
  }

  static PretrainConfig read(const std::string& toml, const std::vector<std::string>& set = {}, bool have_gpu = false) {
    std::ofstream("run.toml") << toml;
    return read_pretrain_config("run.toml", set, have_gpu);
  }
  // Expects a usage error whose text and fix hold these words.
  static void expect_error(const std::string& toml, const std::vector<std::string>& set, const std::string& what,
                           const std::string& fix) {
    SCOPED_TRACE(toml + fmt::format("\n{} sets", set.size()));
    try {
      PretrainConfig config = read(toml, set);
      const auto& mesh = config.mesh;
      resolve_mesh(config, mesh.pp * std::max<int64_t>(mesh.dp, 1) * mesh.cp * mesh.ep, kAnyModel);
      FAIL() << "no error; expected: " << what;
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kUsage);
      EXPECT_NE(error.report().what.find(what), std::string::npos) << error.report().what;
      EXPECT_NE(error.report().fix.find(fix), std::string::npos) << error.report().fix;
    }
  }

  std::filesystem::path home_, folder_;
};

const std::string kFive =
    "model.config = \"m.json\"\n"
    "data.train = [\"c\"]\n"
    "train.steps = 100\n"
    "train.global_batch = 16\n"
    "optimizer.lr = 1e-3\n";

TEST_F(ConfigTest, FiveLinesAreEnough) {
  const PretrainConfig config = read(kFive);
  EXPECT_EQ(config.model.config, "m.json");
  ASSERT_EQ(config.data.train.size(), 1u);
  EXPECT_EQ(config.data.train[0].path, "c");
  EXPECT_EQ(config.data.train[0].weight, 1.0);
  EXPECT_EQ(config.train.steps, 100);
  EXPECT_EQ(config.optimizer.lr, 1e-3);
  EXPECT_EQ(config.optimizer.weight_decay, 0.1);
  EXPECT_EQ(config.mesh.dp, 0);
  EXPECT_EQ(config.log.dir, "runs/run");
  EXPECT_EQ(config.checkpoint.dir, "runs/run/checkpoints");
}

TEST_F(ConfigTest, DeviceAndDtypeFollowTheMachine) {
  EXPECT_EQ(read(kFive).train.device, TrainDevice::kCpu);
  EXPECT_EQ(read(kFive).train.dtype, TrainDtype::kFp32);
  EXPECT_EQ(read(kFive, {}, true).train.device, TrainDevice::kGpu);
  EXPECT_EQ(read(kFive, {}, true).train.dtype, TrainDtype::kBf16);
  const PretrainConfig forced = read(kFive, {"train.device=cpu"}, true);
  EXPECT_EQ(forced.train.device, TrainDevice::kCpu);
  EXPECT_EQ(forced.train.dtype, TrainDtype::kFp32);
  EXPECT_EQ(read(kFive, {"train.dtype=bf16"}).train.dtype, TrainDtype::kBf16);
}

TEST_F(ConfigTest, SectionsSourcesAndOverrides) {
  const PretrainConfig config = read(
      "[model]\nconfig = \"m.json\"\n[data]\n"
      "train = [\"c\", {path = \"v\", weight = 0.25}]\nvalidation = [\"v\"]\nvalidate_every = 5\n"
      "[mesh]\nep = 2\npp = \"auto\"\nschedule = \"1f1b\"\n"
      "[train]\nsteps = 10\nglobal_batch = 8\n[optimizer]\nlr = 1\nname = \"muon\"\n"
      "[log]\ntrace = [3, 4]\n",
      {"train.steps=20", "log.dir=out/x", "data.seq_len = 64", "train.steps=30", "router.balance=sequence",
       "train.deterministic=true"});
  ASSERT_EQ(config.data.train.size(), 2u);
  EXPECT_EQ(config.data.train[1].path, "v");
  EXPECT_EQ(config.data.train[1].weight, 0.25);
  EXPECT_EQ(config.train.steps, 30);
  EXPECT_EQ(config.log.dir, "out/x");
  EXPECT_EQ(config.mesh.pp, 0);
  EXPECT_EQ(config.mesh.dp, 1);  // its default "auto" gives way to pp
  EXPECT_EQ(config.optimizer.name, OptimizerName::kMuon);
  EXPECT_EQ(config.optimizer.lr, 1.0);
  EXPECT_EQ(config.router.balance, BalanceMode::kSequence);
  EXPECT_TRUE(config.train.deterministic);
  EXPECT_EQ(config.log.trace, (std::vector<int64_t>{3, 4}));
}

TEST_F(ConfigTest, FaultsOfSingleKeysNamePlaceKeyAndFix) {
  struct Case {
    std::string line, what, fix;
  };
  const std::vector<Case> cases = {
      {"train.stepz = 3", "run.toml:6:7: unknown key train.stepz", "did you mean train.steps?"},
      {"train.seq_len = 3", "unknown key train.seq_len", "did you mean data.seq_len?"},
      {"train.qqqqqqqqqqqq = 3", "unknown key", "--help-config"},
      {"[trian]\nsteps = 3", "run.toml:6:", "did you mean [train]?"},
      {"steps = 3", "run.toml:6:1: unknown section or top-level key \"steps\"", "use model, data"},
      {"mesh = 3", "run.toml:6:8: mesh is a section, not the integer 3", "write [mesh]"},
      {"data.seq_len = \"x\"", "run.toml:6:16: data.seq_len is the string \"x\"",
       "set data.seq_len to an integer from 1"},
      {"data.seq_len = 1e3", "the floating-point 1000.0", "an integer from 1"},
      {"data.seq_len = 0", "the integer 0, not an integer from 1", "data.seq_len"},
      {"train.seed = -1", "the integer -1", "an integer from 0"},
      {"train.overlap = 1", "the integer 1, not true or false", "true or false"},
      {"train.recompute = \"all\"", "the string \"all\", not \"none\" or \"cheap\" or \"layer\"", "train.recompute"},
      {"train.recompute = true", "the boolean true, not \"none\"", "train.recompute"},
      {"train.dtype = \"fp16\"", "the string \"fp16\", not", "\"bf16\" or \"fp32\" or \"fp8\""},
      {"train.device = \"cuda\"", "\"cuda\"", "\"cpu\" or \"gpu\""},
      {"train.device = \"gpu\"", "run.toml:6:16: train.device is \"gpu\", but no GPU", "\"cpu\""},
      {"optimizer.beta1 = 1", "the integer 1, not a number from 0 below 1", "optimizer.beta1"},
      {"optimizer.beta2 = -0.1", "the floating-point -0.1", "optimizer.beta2"},
      {"optimizer.eps = 0", "the integer 0, not a number above 0", "optimizer.eps"},
      {"optimizer.weight_decay = nan", "nan", "a number from 0"},
      {"optimizer.clip_norm = inf", "inf", "a number from 0"},
      {"mesh.ep = \"all\"", "the string \"all\"", "\"auto\""},
      {"mesh.ep = 0", "the integer 0", "\"auto\""},
      {"data.validation = \"v\"", "the string \"v\", not a list of prefixes", "a list of prefixes"},
      {"data.validation = [1]", "run.toml:6:20: data.validation is the integer 1", "prefixes"},
      {"log.trace = [0]", "the integer 0", "steps from 1"},
      {"log.dir = \"\"", "the string \"\"", "not empty"},
      {"log.dir = 2024-01-01", "the date 2024-01-01", "a string"},
      {"train.steps = 7", "not valid TOML", "repair the TOML"},  // twice in one file
      {"[log]\ntrace = [", "run.toml:7:", "repair the TOML"},
      {"log.trace = [1,\n  ?]", "run.toml:7:3", "repair the TOML"},
      {"x", "run.toml:", "repair the TOML"},
      {"log.dir = \"\\q\"", "run.toml:6:", "repair the TOML"},
      {"train.seed = 99999999999999999999", "run.toml:6:", "repair the TOML"},
      {"log.dir = \xff", "run.toml:6:", "repair the TOML"},
      {"data.train = [\"c\",\n  {path = 7}]", "run.toml:", "repair the TOML"},  // twice
      {"data.validation = [\"v\",\n  7]", "run.toml:7:3", "prefixes"},
      {"data.validation = [\"nowhere\"]", "data.validation: nowhere.bin does not exist", "marrow tokenize"},
      {"data.validation = [\"half\"]", "half.idx does not exist", "marrow tokenize"},
      {"model.init_from = \"gone\"", "\"gone\" does not exist", "model.init_from"},
  };
  for (const Case& c : cases) expect_error(kFive + c.line + "\n", {}, c.what, c.fix);
}

TEST_F(ConfigTest, FaultsOfOverridesNameTheOverride) {
  struct Case {
    std::string set, what, fix;
  };
  const std::vector<Case> cases = {
      {"train.steps=ten", "--set train.steps: train.steps is the string \"ten\"", "an integer"},
      {"train.stesp=1", "--set train.stesp: unknown key", "train.steps"},
      {"train.steps", "is no assignment", "--set SECTION.KEY=VALUE"},
      {"train.steps=", "is no assignment", "--set SECTION.KEY=VALUE"},
      {"=3", "is no assignment", "--set SECTION.KEY=VALUE"},
      {"train.steps.x=3", "--set train.steps.x: unknown section or top-level key \"train.steps\"", "train"},
      {"train=3", "--set train: train is a section", "[train]"},
      {"model.config=gone.json", "\"gone.json\" is no file", "config.json"},
      {"data.train=[]", "data.train is an empty list", "data/corpus"},
      {"data.train=c", "the string \"c\", not a list", "a list of prefixes"},
      {"data.train=[\"gone\"]", "data.train: gone.bin does not exist", "marrow tokenize"},
      {"data.train=[{path=\"c\", weight=0}]", "the integer 0", "above 0"},
      {"data.train=[{path=\"c\", wieght=1}]", "no key \"wieght\"", "path and weight"},
      {"data.train=[{weight=1}]", "the table", "{path = ..., weight"},
      {"train.global_batch=10\nx = 1", "train.global_batch is the string", "an integer"},
  };
  for (const Case& c : cases) expect_error(kFive, {c.set}, c.what, c.fix);
}

TEST_F(ConfigTest, TextThatNoParserAndNamesThatNoSystemTakes) {
  expect_error("[%model]\nconfig = 1\n", {}, "run.toml:1:2: not valid TOML", "repair the TOML");
  expect_error("[[=a]]\n", {}, "run.toml:1:3: not valid TOML", "repair the TOML");
  expect_error(kFive, {"model.init_from=\x7f"}, "does not exist", "model.init_from");
  const std::string name(300, 'm');
  for (const char* key : {"model.config", "model.init_from"}) expect_error(kFive, {key + ("=" + name)}, key, key);
  for (const char* key : {"data.train", "data.validation"}) {
    expect_error(kFive, {fmt::format("{}=[\"{}\"]", key, name)}, key, key);
  }
}

TEST_F(ConfigTest, EachMissingRequiredKeyIsNamed) {
  for (const std::string key : {"model.config", "data.train", "train.steps", "train.global_batch", "optimizer.lr"}) {
    std::string rest;
    for (size_t start = 0; start < kFive.size();) {
      const size_t end = kFive.find('\n', start) + 1;
      const std::string line = kFive.substr(start, end - start);
      if (!line.starts_with(key + " ")) rest += line;
      start = end;
    }
    expect_error(rest, {}, key + " is missing", "add " + key + " = ");
  }
}

TEST_F(ConfigTest, FaultsBetweenKeys) {
  struct Case {
    std::vector<std::string> set;
    std::string what, fix;
  };
  const std::vector<Case> cases = {
      {{"train.micro_batch=3"},
       "train.global_batch 16 does not divide by train.micro_batch 3",
       "set train.global_batch to 15 or 18, or train.micro_batch to 2"},
      {{"mesh.dp=3"}, "x mesh.dp 3 x mesh.ep 1 = 3", "set train.global_batch to 15 or 18"},
      {{"mesh.ep=4", "train.micro_batch=8"}, "= 32", "to 32, or train.micro_batch to 4"},
      {{"optimizer.warmup_steps=60", "optimizer.decay_steps=50"},
       "warmup_steps 60 + optimizer.decay_steps 50 exceed train.steps 100",
       "train.steps to 110"},
      {{"optimizer.min_lr=2e-3"}, "min_lr 0.002 is above optimizer.lr 0.001", "optimizer.min_lr"},
      {{"optimizer.schedule=constant", "optimizer.decay_steps=5"}, "has no meaning", "\"wsd\""},
      {{"train.fp8_at_any_size=true"}, "without train.dtype \"fp8\"", "\"fp8\""},
      {{"data.validate_every=5"}, "data.validation names no corpus", "data.validation"},
      {{"mesh.cp=4", "data.seq_len=100"}, "data.seq_len 100 does not divide by 2 x mesh.cp = 8", "to 96 or 104"},
      {{"mesh.dp=4", "mesh.replicate=3"}, "mesh.replicate 3 does not divide mesh.dp 4", "mesh.replicate to 2"},
      {{"mesh.pp=4", "mesh.dp=4"}, "at least 2 x mesh.pp = 8 micro-batches", "global_batch to 32"},
      {{"mesh.pp=auto", "mesh.ep=auto"}, "2 dimensions of [mesh] are \"auto\"", "all but one"},
  };
  for (const Case& c : cases) expect_error(kFive, c.set, c.what, c.fix);
}

// Of the model's 8 experts, first of all; and what is proposed goes with the batch of 16 and the processes.
TEST_F(ConfigTest, ExpertRanksDivideTheExperts) {
  const ModelShape shape{.layers = 4, .max_position = 4096, .experts = 8};
  for (const auto& [world, fix] :
       {std::pair(
            6, "set [mesh] to pp 3 x dp 1 x cp 1 x ep 2, or pp 3 x dp 2 x cp 1 x ep 1, or pp 3 x dp 1 x cp 2 x ep 1"),
        {3,
         "start 2 processes (--processes 2) with [mesh] pp 1 x dp 1 x cp 1 x ep 2, or pp 1 x dp 2 x cp 1 x ep 1, or "
         "pp 1 x dp 1 x cp 2 x ep 1"},
        {8, "set [mesh] to pp 1 x dp 2 x cp 1 x ep 4, or pp 1 x dp 4 x cp 1 x ep 2, or pp 1 x dp 1 x cp 1 x ep 8"}}) {
    PretrainConfig config = read(kFive, {"mesh.ep=3", "mesh.dp=auto", fmt::format("mesh.pp={}", world == 6 ? 3 : 1),
                                         fmt::format("train.micro_batch={}", world == 8 ? 2 : 1),
                                         fmt::format("mesh.schedule={}", world == 6 ? "1f1b" : "dualpipev")});
    try {
      check_model_fits(config, shape, world);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()), "8 experts do not divide by mesh.ep = 3");
      EXPECT_EQ(error.report().fix, std::string("set mesh.ep to a divisor of 8: ") + fix);
      EXPECT_EQ(error.report().who, (std::vector<std::string>{"config run.toml", "mesh.ep at --set mesh.ep"}));
    }
  }
}

TEST_F(ConfigTest, EveryChunkOfThePipelineHasALayer) {
  const auto error_of = [](std::vector<std::string> set, ModelShape shape, int64_t world) {
    shape.max_position = 4096;
    shape.experts = 8;
    PretrainConfig config = read(kFive, set);
    try {
      check_model_fits(config, shape, world);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kUsage);
      return error.report();
    }
    return ErrorReport{};
  };
  const ErrorReport one = error_of({"mesh.pp=2"}, {.layers = 1}, 2);
  EXPECT_EQ(one.what, "the model has 1 layers; mesh.pp = 2 cuts it into 4 chunks");
  EXPECT_EQ(one.fix,
            "set [mesh] to pp 1 x dp 2 x cp 1 x ep 1, or pp 1 x dp 1 x cp 1 x ep 2, or pp 1 x dp 1 x cp 2 x ep 1");
  EXPECT_EQ(one.who, (std::vector<std::string>{"config run.toml", "mesh.pp at --set mesh.pp"}));
  EXPECT_TRUE(error_of({"mesh.pp=2"}, {.layers = 3}, 2).fix.ends_with(", or set mesh.schedule = \"1f1b\""));
  const ModelShape tied{.layers = 3, .tied_embeddings = true};  // 1F1B would divide the embedding
  EXPECT_EQ(error_of({"mesh.pp=2"}, tied, 2).fix.find("1f1b"), std::string::npos);
  // Two processes could not be what the mesh says.
  EXPECT_EQ(error_of({"mesh.pp=2"}, {.layers = 1}, 1).fix, "set [mesh] to pp 1 x dp 1 x cp 1 x ep 1");
  EXPECT_EQ(error_of({"mesh.pp=5", "mesh.dp=1", "data.seq_len=1022"}, {.layers = 1}, 5).fix,
            "start 4 processes (--processes 4) with [mesh] pp 1 x dp 4 x cp 1 x ep 1, or pp 1 x dp 1 x cp 1 x ep 4, or "
            "pp 1 x dp 2 x cp 1 x ep 2");
}

// Whatever an error proposes, works.
TEST_F(ConfigTest, ProposedMeshesWork) {
  const std::regex mesh("pp ([0-9]+) x dp ([0-9]+) x cp ([0-9]+) x ep ([0-9]+)");
  int64_t proposals = 0, failures = 0, schedules = 0;
  for (int i = 0; i < 2000; ++i) {
    std::mt19937_64 random(i);
    const auto one_of = [&](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(random() % (high - low + 1));
    };
    PretrainConfig config = read(kFive);
    config.mesh.pp = one_of(1, 4), config.mesh.ep = one_of(1, 4), config.mesh.cp = one_of(1, 2);
    config.mesh.dp = one_of(0, 3);
    config.mesh.schedule = i % 3 == 0 ? PipelineSchedule::kOneFOneB : PipelineSchedule::kDualPipeV;
    config.train.global_batch = 4 * one_of(1, 6), config.train.micro_batch = one_of(1, 3);
    config.mesh.replicate = std::max<int64_t>(one_of(-4, 3), 1);
    const ModelShape shape{.layers = one_of(1, 6),
                           .max_position = 4096,
                           .experts = one_of(2, 9),
                           .tied_embeddings = i % 5 == 0 || i % 6 == 0};
    const PretrainConfig given = config;
    try {
      check_model_fits(config, shape, one_of(1, 12));
    } catch (const Error& error) {
      const std::string& fix = error.report().fix;
      if (fix.starts_with("set mesh.schedule")) {
        PretrainConfig proposed = given;
        proposed.mesh.schedule = PipelineSchedule::kDualPipeV;
        const int64_t world = proposed.mesh.pp * std::max<int64_t>(proposed.mesh.dp, 1) * proposed.mesh.cp;
        EXPECT_NO_THROW(check_model_fits(proposed, shape, world * proposed.mesh.ep)) << error.what() << fix;
        ++schedules;
        continue;
      }
      if (error.report().what.find("does not fit") == std::string::npos &&
          error.report().what.find("experts do not divide") == std::string::npos &&
          error.report().what.find("tied") == std::string::npos &&
          error.report().what.find("the model has") == std::string::npos) {
        EXPECT_TRUE(fix.starts_with("set ") || fix.starts_with("raise ")) << fix;  // a batch, a sequence, replicate
        continue;
      }
      ++failures;
      EXPECT_TRUE(std::regex_search(fix, mesh)) << fix;
      for (std::sregex_iterator it(fix.begin(), fix.end(), mesh); it != std::sregex_iterator(); ++it) {
        PretrainConfig proposed = given;
        proposed.mesh.pp = std::stoll((*it)[1]), proposed.mesh.dp = std::stoll((*it)[2]);
        proposed.mesh.cp = std::stoll((*it)[3]), proposed.mesh.ep = std::stoll((*it)[4]);
        EXPECT_NO_THROW(check_model_fits(proposed, shape, proposed.mesh.world())) << error.what() << fix;
        ++proposals;
      }
      if (!fix.ends_with("\"1f1b\"")) continue;
      PretrainConfig proposed = given;
      proposed.mesh.schedule = PipelineSchedule::kOneFOneB;
      EXPECT_NO_THROW(check_model_fits(proposed, shape, config.mesh.world())) << error.what() << fix;
    }
  }
  EXPECT_GT(failures, 500);
  EXPECT_GT(proposals, 1000);
  EXPECT_GT(schedules, 5);
}

TEST_F(ConfigTest, MeshFitsTheProcesses) {
  PretrainConfig config = read(kFive, {"mesh.ep=2", "mesh.pp=2"});
  resolve_mesh(config, 8, kAnyModel);
  EXPECT_EQ(config.mesh.dp, 2);
  PretrainConfig uneven = read(kFive, {"mesh.ep=2"});
  EXPECT_THROW(resolve_mesh(uneven, 3, kAnyModel), Error);
  PretrainConfig fixed = read(kFive, {"mesh.ep=2", "mesh.dp=1"});
  try {
    resolve_mesh(fixed, 4, kAnyModel);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.report().code, ExitCode::kUsage);
    EXPECT_NE(error.report().fix.find("--processes 2"), std::string::npos);
    // One size changes.
    EXPECT_NE(
        error.report().fix.find(
            "set [mesh] to pp 1 x dp 2 x cp 1 x ep 2, or pp 1 x dp 1 x cp 1 x ep 4, or pp 1 x dp 1 x cp 2 x ep 2"),
        std::string::npos)
        << error.report().fix;
    EXPECT_NE(std::string(error.what()).find("pp 1 x dp 1 x cp 1 x ep 2 does not fit 4 processes"), std::string::npos);
  }
  PretrainConfig odd = read(kFive, {"mesh.ep=2"});  // neither dp nor cp can be 3: no batch and no sequence divides
  try {
    resolve_mesh(odd, 3, kAnyModel);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.report().fix,
              "start 2 processes (--processes 2) with [mesh] pp 1 x dp 1 x cp 1 x ep 2, or set [mesh] to pp 3 x dp 1 x "
              "cp 1 x ep 1");
  }
  PretrainConfig batch = read(kFive, {"train.global_batch=6"});  // divides only once dp is known
  EXPECT_THROW(resolve_mesh(batch, 4, kAnyModel), Error);
}

// Random valid configs survive to_toml and reading back; to_toml covers all fields, so equality of
// the texts is equality of the configs.
TEST_F(ConfigTest, TomlRoundTrip) {
  std::mt19937_64 random(7);
  const auto number = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto real = [&] { return std::uniform_real_distribution<double>(1e-9, 0.99)(random); };
  for (int round = 0; round < 200; ++round) {
    PretrainConfig config = read(kFive);
    config.data.train = {{"c", real()}, {"v", 1.0}};
    if (round % 2 == 0) config.data.validation = {"v", "c"};
    config.data.mask_documents = number(0, 1) == 1;
    config.mesh.shard = static_cast<ShardMode>(number(0, 1));
    config.train.steps = number(1000, int64_t{1} << 40);
    config.train.seed = number(0, INT64_MAX);
    config.train.dtype = static_cast<TrainDtype>(number(0, 2));
    config.train.recompute = static_cast<Recompute>(number(0, 2));
    config.optimizer.lr = 1.0 + real();
    config.optimizer.min_lr = real();
    config.optimizer.beta1 = real();
    config.optimizer.eps = real() * 1e-12;
    config.optimizer.name = static_cast<OptimizerName>(number(0, 1));
    config.optimizer.schedule = static_cast<LearningRateSchedule>(number(0, 2));
    config.router.balance = static_cast<BalanceMode>(number(0, 4));
    config.router.coef = round % 3 == 0 ? -1.0 : real();
    config.checkpoint.resume = number(0, 1) == 1;
    config.log.dir = "\xC3\xA9\xF0\x9F\x98\x80";
    for (int byte = 1; byte < 128; ++byte) config.log.dir += static_cast<char>(byte);
    config.log.trace = {number(1, 9), number(1, 9)};
    config.log.watchdog_seconds = real();
    const std::string text = to_toml(config);
    const PretrainConfig back = read(text);
    ASSERT_EQ(to_toml(back), text);
    EXPECT_EQ(back.log.dir, config.log.dir);
    EXPECT_EQ(back.optimizer.eps, config.optimizer.eps);
    EXPECT_EQ(back.router.coef, config.router.coef);
    EXPECT_EQ(back.data.train[0].weight, config.data.train[0].weight);
    EXPECT_EQ(back.train.seed, config.train.seed);
  }
}

TEST_F(ConfigTest, ChangedSettingsAreThoseThatTheEarlierConfigDoesNotHave) {
  const PretrainConfig before = read(kFive);
  EXPECT_EQ(changed_settings(to_toml(before), before), std::vector<std::string>{});
  PretrainConfig now = before;
  now.train.steps += 5;
  now.router.balance = BalanceMode::kSequence;
  now.log.dir = "elsewhere";  // not checkpoint.dir, whose key has the same name
  EXPECT_EQ(changed_settings(to_toml(before), now),
            (std::vector<std::string>{fmt::format("train.steps = {}", now.train.steps), "router.balance = \"sequence\"",
                                      "log.dir = \"elsewhere\""}));
}

TEST_F(ConfigTest, HelpListsEveryKeyOfTheFile) {
  const std::string help = config_help();
  const std::string text = to_toml(read(kFive));
  for (size_t start = 0; start < text.size();) {
    const size_t end = text.find('\n', start);
    const std::string line = text.substr(start, end - start);
    const std::string key = line.substr(0, line.find(" = ") + 3);
    const bool is_key = !line.empty() && line[0] != '[';
    EXPECT_TRUE(!is_key || help.find("\n" + key) != std::string::npos) << key;
    start = end + 1;
  }
  EXPECT_NE(help.find("coef = ..."), std::string::npos);
  EXPECT_NE(help.find("steps = REQUIRED"), std::string::npos);
}

}  // namespace
}  // namespace marrow
