#include "train/checkpoint.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>

#include "train/checkpoint_testing.h"

namespace marrow {
namespace {

CheckpointWriterOptions options_for(const TemporaryFolder& folder, bool async = false) {
  CheckpointWriterOptions options;
  options.dir = folder / "checkpoints";
  options.async = async;
  options.max_shard_bytes = 20'000;  // several files
  return options;
}

// A save of one rank.
void save_one(const ToyModel& toy, const CheckpointWriterOptions& options, int64_t step) {
  save_as_ranks(toy, cut(toy, 1, 0, step), options, step);
}

TEST(CheckpointTest, BytesDoNotDependOnTheSplit) {
  for (const OptimizerName optimizer : {OptimizerName::kAdamW, OptimizerName::kMuon}) {
    for (const at::ScalarType state : {at::kFloat, at::kBFloat16}) {
      const ToyModel toy(optimizer);
      std::map<std::string, std::string> first;
      for (const size_t ranks : {1, 2, 3, 5}) {
        const TemporaryFolder folder;
        CheckpointWriterOptions options = options_for(folder, /*async=*/ranks % 2 == 0);
        options.state_dtype = state;
        save_as_ranks(toy, cut(toy, ranks, 11 * static_cast<unsigned>(ranks), 1, state), options, 1);
        const auto files = contents(step_folder(options.dir, 1));
        if (first.empty()) first = files;
        ASSERT_GT(files.size(), 10u);
        for (const auto& [name, text] : files) ASSERT_TRUE(text == first[name]) << name << ranks;
        EXPECT_EQ(files.size(), first.size());
      }
      EXPECT_TRUE(first.contains("model-00001-of-00005.safetensors"));
      EXPECT_TRUE(first.contains("COMPLETE"));
    }
  }
}

// C3 without the mesh itself: any split loads what any other saved, and saves the same bytes again.
TEST(CheckpointTest, LoadsOnAnyOtherSplit) {
  const ToyModel toy;
  const TemporaryFolder folder;
  const CheckpointWriterOptions options = options_for(folder);
  save_as_ranks(toy, cut(toy, 4, 1, 3), options, 3);
  Logger log;
  const auto saved = contents(step_folder(options.dir, 3));
  for (const size_t ranks : {1, 2, 3, 8}) {
    const auto checkpoint = newest_checkpoint(options.dir, log);
    ASSERT_TRUE(checkpoint.has_value());
    const auto owned = cut(toy, ranks, 100 + static_cast<unsigned>(ranks), /*version=*/-1);
    load_all(toy, *checkpoint, owned);
    expect_filled(owned, 3);
    const TemporaryFolder other;
    save_as_ranks(toy, owned, options_for(other), 3);
    EXPECT_TRUE(contents(step_folder(other / "checkpoints", 3)) == saved);
  }
}

// C1: expert ids are global in every file.
TEST(CheckpointTest, ExpertsKeepTheirOwnNumbers) {
  const ToyModel toy;
  const TemporaryFolder folder;
  const auto number = [](const std::string& name) {
    const size_t at = name.find(".experts.");
    return at == std::string::npos ? -1.0 : std::stod(name.substr(at + 9));
  };
  std::vector<std::vector<OwnedRange>> owned(4);  // ep = 4: two experts a rank
  for (const CheckpointTensor& entry : toy.entries) {
    const double e = number(entry.tensor.name);
    const int64_t n = entry.tensor.elements();
    owned[e < 0 ? 0 : static_cast<size_t>(e / 2)].push_back({&entry.tensor, 0, n, at::full({n}, e, at::kFloat),
                                                             at::full({n}, e + 0.25, at::kFloat),
                                                             at::full({n}, e + 0.5, at::kFloat)});
  }
  save_as_ranks(toy, owned, options_for(folder), 1);
  Logger log;
  const auto checkpoint = newest_checkpoint(folder / "checkpoints", log);
  ASSERT_TRUE(checkpoint.has_value());
  for (const size_t ranks : {1, 2, 4}) {
    const auto loaded = cut(toy, ranks, 5, -1);
    load_all(toy, *checkpoint, loaded);
    int64_t experts = 0;
    for (const auto& ranges : loaded) {
      for (const OwnedRange& range : ranges) {
        const double e = number(range.tensor->name);
        if (e < 0) continue;
        ASSERT_TRUE(range.master.eq(e).all().item<bool>()) << range.tensor->name;
        ASSERT_TRUE(range.exp_avg.eq(e + 0.25).all().item<bool>()) << range.tensor->name;
        ASSERT_TRUE(range.exp_avg_sq.eq(e + 0.5).all().item<bool>()) << range.tensor->name;
        experts += range.end - range.begin;
      }
    }
    EXPECT_EQ(experts, 2 * 8 * 3 * 12 * 16);  // layers, experts, projections, sizes
  }
}

TEST(CheckpointTest, RestoresStateAndSideFiles) {
  const ToyModel toy;
  const TemporaryFolder folder;
  save_one(toy, options_for(folder), 42);
  const Checkpoint checkpoint(step_folder(folder / "checkpoints", 42));
  EXPECT_EQ(to_json(checkpoint.state()), to_json(toy_content(toy, {}, 42).state));
  EXPECT_EQ(checkpoint.config().at("vocab_size").as_int(), 515);
  EXPECT_EQ(read_text_file(checkpoint.folder() + "/run.toml"), "# a run\n");
  EXPECT_EQ(read_text_file(checkpoint.folder() + "/router_state.json"), "{\"a\": [1]}");
}

TEST(CheckpointTest, AsynchronousSaveHoldsTheValuesOfItsMoment) {
  const ToyModel toy;
  const TemporaryFolder folder;
  const auto owned = cut(toy, 1, 0, 1);
  Logger log;
  CheckpointWriter writer(options_for(folder, /*async=*/true), toy.entries, log);
  for (int64_t step = 1; step <= 3; ++step) {
    writer.save(toy_content(toy, owned[0], step));
    for (const OwnedRange& range : owned[0]) {  // training goes on at once
      for (const at::Tensor& values : {range.master, range.exp_avg, range.exp_avg_sq}) {
        values.add_(10007.0);  // the next version
      }
    }
  }
  writer.finish();
  for (const int64_t step : {2, 3}) {
    const auto loaded = cut(toy, 1, 0, -1);
    load_all(toy, Checkpoint(step_folder(folder / "checkpoints", step)), loaded);
    expect_filled(loaded, step);
  }
  EXPECT_EQ(step_folders(folder / "checkpoints").size(), 2u);  // keep = 2
}

TEST(CheckpointTest, KeepsTheNewestAndClearsLeftovers) {
  const ToyModel toy;
  const TemporaryFolder folder;
  CheckpointWriterOptions options = options_for(folder);
  fs::create_directories(options.dir + "/.step-00000009.marrow-tmp/x");
  fs::create_directories(step_folder(options.dir, 1));  // never marked complete
  options.keep = 0;
  for (const int64_t step : {2, 3, 4}) save_one(toy, options, step);
  EXPECT_EQ(step_folders(options.dir).size(), 3u);
  EXPECT_FALSE(fs::exists(options.dir + "/.step-00000009.marrow-tmp"));
  options.keep = 1;
  save_one(toy, options, 5);
  EXPECT_EQ(step_folders(options.dir), std::vector<std::string>{step_folder(options.dir, 5)});
  // A damaged one does not count among those kept.
  options.keep = 2;
  save_one(toy, options, 6);
  fs::resize_file(step_folder(options.dir, 6) + "/config.json", 3);
  save_one(toy, options, 7);
  EXPECT_TRUE(fs::exists(step_folder(options.dir, 5)));
}

TEST(CheckpointTest, SavesTheSameStepAgain) {
  const ToyModel toy;
  const TemporaryFolder folder;
  const CheckpointWriterOptions options = options_for(folder);
  save_as_ranks(toy, cut(toy, 2, 0, 1), options, 10);
  save_as_ranks(toy, cut(toy, 3, 0, 2), options, 10);
  const auto loaded = cut(toy, 1, 0, -1);
  load_all(toy, Checkpoint(step_folder(options.dir, 10)), loaded);
  expect_filled(loaded, 2);
  EXPECT_FALSE(fs::exists(staging_path(step_folder(options.dir, 10))));
}

// However a file is cut into ranges, and whichever byte changes.
TEST(CheckpointTest, ChecksumsAddUpAndShowEveryFlippedByte) {
  std::mt19937 random(1);
  std::vector<std::byte> file(1003);
  for (std::byte& byte : file) byte = static_cast<std::byte>(random());
  const std::span<const std::byte> all(file);
  const uint64_t whole = range_checksum(all, 0);
  for (int round = 0; round < 100; ++round) {
    uint64_t sum = 0;
    for (size_t begin = 0; begin < file.size();) {
      const size_t n = std::min<size_t>(random() % 40, file.size() - begin);
      sum += range_checksum(all.subspan(begin, n), static_cast<int64_t>(begin));
      begin += n;
    }
    EXPECT_EQ(sum, whole);
  }
  for (std::byte& byte : file) {
    for (int bit = 0; bit < 8; ++bit) {
      byte ^= std::byte{1} << bit;
      EXPECT_NE(range_checksum(all, 0), whole);
      byte ^= std::byte{1} << bit;
    }
  }
  const int64_t far = int64_t{1} << 40;  // beyond 32 bits of words
  EXPECT_NE(range_checksum(all, far), range_checksum(all, far + (int64_t{1} << 34)));
}

// What an interrupted save of the same step left, complete with its ranks' notes, is not this save's.
TEST(CheckpointTest, NotesOfAnotherSaveAreIgnored) {
  const ToyModel toy;
  const TemporaryFolder folder;
  CheckpointWriterOptions options = options_for(folder);
  options.ranks = 2;
  options.run = "run";
  options.timeout_seconds = 20;
  CheckpointFiles stale(step_folder(options.dir, 1), toy.entries, at::kFloat, options.max_shard_bytes);
  stale.open(0, "earlier-1");
  stale.finish_writing();
  CheckpointFiles stale_second(step_folder(options.dir, 1), toy.entries, at::kFloat, options.max_shard_bytes);
  stale_second.open(1, "earlier-1", 1);
  stale_second.finish_writing();
  const auto owned = cut(toy, 2, 8, 4);
  std::vector<std::thread> threads;
  for (const int64_t rank : {1, 0}) {
    threads.emplace_back([&, rank, mine = options]() mutable {
      mine.rank = rank;
      Logger log;
      CheckpointWriter writer(mine, toy.entries, log);
      writer.save(toy_content(toy, owned[static_cast<size_t>(rank)], 1));
    });
    usleep(200'000);
  }
  for (std::thread& thread : threads) thread.join();
  const auto loaded = cut(toy, 1, 0, -1);
  load_all(toy, Checkpoint(step_folder(options.dir, 1)), loaded);
  expect_filled(loaded, 4);
}

TEST(CheckpointTest, RanksDoNotWaitForEver) {
  const ToyModel toy;
  for (const int64_t rank : {0, 1}) {
    const TemporaryFolder folder;
    CheckpointWriterOptions options = options_for(folder);
    options.rank = rank;
    options.ranks = 2;
    options.run = "run";
    options.timeout_seconds = 0.1;
    Logger log;
    CheckpointWriter writer(options, toy.entries, log);
    expect_error(ExitCode::kDeviceFault, {rank == 0 ? "rank-00001.written" : "ready", "0.1 s"},
                 [&] { writer.save(toy_content(toy, cut(toy, 1, 0, 1)[0], 1)); });
    options.run = "";
    expect_error(ExitCode::kUsage, {"2 ranks"}, [&] { CheckpointWriter nameless(options, toy.entries, log); });
  }
}

TEST(CheckpointTest, DamagedOnesAreNamedAndSkipped) {
  const ToyModel toy;
  const std::string shard = "model-00002-of-00005.safetensors";
  std::vector<std::pair<std::string, std::function<void(const std::string&)>>> damages{
      {shard, [&](const std::string& f) { fs::resize_file(f + "/" + shard, 1000); }},
      {shard, [&](const std::string& f) { fs::remove(f + "/" + shard); }},
      {"COMPLETE", [](const std::string& f) { fs::remove(f + "/COMPLETE"); }},
      {"COMPLETE", [](const std::string& f) { fs::resize_file(f + "/COMPLETE", 30); }},
      {"trainer_state.json", [](const std::string& f) { fs::remove(f + "/trainer_state.json"); }},
      {shard, [&](const std::string& f) {  // of the right size, but with a broken header
         OutputFile file(f + "/" + shard, true);
         file.write_at(20, std::as_bytes(std::span("garbage")));
       }}};
  for (const char* file :
       {"model-00001-of-00005.safetensors", "model-00005-of-00005.safetensors", "optimizer-00003-of-00010.safetensors",
        "router_state.json", "trainer_state.json", "config.json", "run.toml", "COMPLETE"}) {
    damages.emplace_back(file, [=](const std::string& f) {  // one bit of one byte
      const std::string path = f + "/" + file;
      flip_byte(path, fs::file_size(path) * 3 / 4);
    });
  }
  for (const auto& [name, damage] : damages) {
    const TemporaryFolder folder;
    const CheckpointWriterOptions options = options_for(folder);
    save_one(toy, options, 1);
    save_one(toy, options, 2);
    damage(step_folder(options.dir, 2));
    expect_error(ExitCode::kBadInput, {"step-00000002", name.c_str()},
                 [&] { Checkpoint refused(step_folder(options.dir, 2), ContentCheck{}); });
    testing::internal::CaptureStderr();
    Logger log;
    const auto newest = newest_checkpoint(options.dir, log);
    const std::string warning = testing::internal::GetCapturedStderr();
    ASSERT_TRUE(newest.has_value());
    EXPECT_EQ(newest->state().step, 1);
    EXPECT_NE(warning.find("step-00000002"), std::string::npos) << warning;
    EXPECT_NE(warning.find(name), std::string::npos) << warning;
  }
}

TEST(CheckpointTest, OtherModelsTensorsAreRefusedByName) {
  const ToyModel toy;
  const TemporaryFolder folder;
  save_one(toy, options_for(folder), 1);
  const Checkpoint checkpoint(step_folder(folder / "checkpoints", 1));
  auto more = toy.tensors;
  more.push_back({"model.extra.weight", {3}});
  expect_error(ExitCode::kBadInput, {"model.extra.weight", "missing"},
               [&] { ModelWeights(checkpoint.folder(), more, {}); });
  auto fewer = toy.tensors;
  const std::string last = fewer.back().name;
  fewer.pop_back();
  expect_error(ExitCode::kBadInput, {last.c_str(), "does not belong"},
               [&] { ModelWeights(checkpoint.folder(), fewer, {}); });
  auto other = toy.tensors;
  other[0].shape = {600, 16};
  expect_error(ExitCode::kBadInput, {"embed_tokens", "[515, 16]", "[600, 16]"},
               [&] { ModelWeights(checkpoint.folder(), other, {}); });
  // Muon keeps no second moment of matrices; AdamW would miss it.
  const ToyModel muon(OptimizerName::kMuon);
  expect_error(ExitCode::kBadInput, {".exp_avg_sq", "present"},
               [&] { checkpoint.load_optimizer(cut(muon, 1, 0, -1)[0]); });
  expect_error(ExitCode::kBadInput, {".exp_avg", "BFloat16", "F32"},
               [&] { checkpoint.load_optimizer(cut(toy, 1, 0, -1, at::kBFloat16)[0]); });
}

TEST(CheckpointTest, RangesThatLeaveAHoleAreRefused) {
  const ToyModel toy;
  const TemporaryFolder folder;
  auto owned = cut(toy, 1, 0, 1);
  owned[0].pop_back();
  Logger log;
  CheckpointWriter writer(options_for(folder), toy.entries, log);
  expect_error(ExitCode::kDeviceFault, {"bytes of the"}, [&] { writer.save(toy_content(toy, owned[0], 1)); });
  EXPECT_TRUE(step_folders(folder / "checkpoints").empty());
}

// Limits the size of files that this process may write, as a full disk would.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &old_);
    rlimit limit = old_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int);
};

TEST(CheckpointTest, AFullDiskLeavesEarlierCheckpointsAlone) {
  const ToyModel toy;
  for (const bool async : {false, true}) {
    const TemporaryFolder folder;
    CheckpointWriterOptions options = options_for(folder, async);
    options.keep = 1;
    save_one(toy, options, 1);
    const auto before = contents(step_folder(options.dir, 1));
    Logger log;
    const auto owned = cut(toy, 1, 0, 2);
    {
      CheckpointWriter writer(options, toy.entries, log);
      const FileSizeLimit limit(10'000);
      expect_error(ExitCode::kDeviceFault, {".step-00000002.marrow-tmp", "bytes"}, [&] {
        writer.save(toy_content(toy, owned[0], 2));
        writer.finish();
      });
    }
    EXPECT_FALSE(fs::exists(staging_path(step_folder(options.dir, 2))));
    EXPECT_FALSE(fs::exists(step_folder(options.dir, 2)));
    EXPECT_TRUE(contents(step_folder(options.dir, 1)) == before);
    CheckpointWriter writer(options, toy.entries, log);  // once there is space again
    writer.save(toy_content(toy, owned[0], 2));
    writer.finish();
    EXPECT_EQ(newest_checkpoint(options.dir, log)->state().step, 2);
  }
}

// Saves steps 1, 2, 3 … and reports each on `report` once save() has returned.
[[noreturn]] void save_forever(const ToyModel& toy, const CheckpointWriterOptions& options, int64_t step, int report) {
  Logger log;
  CheckpointWriter writer(options, toy.entries, log);
  for (;; ++step) {
    writer.save(toy_content(toy, cut(toy, 1, 0, step)[0], step));
    if (write(report, &step, sizeof step) != sizeof step) _exit(1);
  }
}

TEST(CheckpointTest, AKillAtAnyMomentLosesNothing) {
  at::set_num_threads(1);  // a forked child has no OpenMP threads to wait for
  const ToyModel toy;
  const TemporaryFolder folder;
  const CheckpointWriterOptions options = options_for(folder);
  std::mt19937 random(3);
  int64_t newest_step = 0;
  Logger log;
  log.set_quiet(true);
  for (int round = 0; round < 20; ++round) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) save_forever(toy, options, newest_step + 1, ends[1]);
    close(ends[1]);
    int64_t reported = newest_step;
    if (read(ends[0], &reported, sizeof reported) <= 0) FAIL() << "the child saved nothing";
    usleep(static_cast<useconds_t>(random() % 60'000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    while (read(ends[0], &reported, sizeof reported) > 0) {
    }
    close(ends[0]);
    const auto checkpoint = newest_checkpoint(options.dir, log);
    ASSERT_TRUE(checkpoint.has_value());
    newest_step = checkpoint->state().step;
    EXPECT_GE(newest_step, reported);
    const auto loaded = cut(toy, 1, 0, -1);
    load_all(toy, *checkpoint, loaded);
    expect_filled(loaded, newest_step);
  }
}

TEST(TrainerStateTest, ChangesThatAlterTheRunAreRefusedWithBothValues) {
  const ToyModel toy;
  const TrainerState saved = toy_content(toy, {}, 5).state;
  const Json config = Json::parse(toy.text, "saved");
  const auto refuses = [&](std::initializer_list<const char*> parts, auto change) {
    TrainerState current = saved;
    change(current);
    expect_error(ExitCode::kUsage, parts, [&] { check_resumable(saved, config, current, config); });
  };
  EXPECT_NO_THROW(check_resumable(saved, config, saved, config));
  refuses({"data.seq_len", "32", "64"}, [](auto& s) { s.seq_len = 64; });
  refuses({"train.seed", "7", "8"}, [](auto& s) { s.seed = 8; });
  refuses({"data.train", "c0ffee", "deca1f"}, [](auto& s) { s.corpus = "deca1f"; });
  refuses({"tokenizer", "b17e5", "0ther"}, [](auto& s) { s.tokenizer_hash = "0ther"; });
  refuses({"optimizer.name", "adamw", "muon"}, [](auto& s) { s.optimizer = "muon"; });
  refuses({"state_dtype", "fp32", "bf16"}, [](auto& s) { s.state_dtype = "bf16"; });
  const Json other = Json::parse(toy_config_text(16), "current");
  expect_error(ExitCode::kUsage, {"num_experts", "16", "8"}, [&] { check_resumable(saved, config, saved, other); });
}

TEST(TrainerStateTest, BothStylesOfAConfigAreOneModel) {
  const TrainerState state;
  const Json old = Json::parse(R"({"model_type": "qwen3_moe", "num_experts": 8, "rope_theta": 1000000,
      "torch_dtype": "float32"})",
                               "old");
  const auto current = [](const char* theta) {
    return Json::parse(fmt::format(R"({{"model_type": "qwen3_moe", "num_local_experts": 8, "dtype": "bf16",
      "rope_parameters": {{"rope_type": "default", "rope_theta": {}}}}})",
                                   theta),
                       "new");
  };
  EXPECT_NO_THROW(check_resumable(state, old, state, current("1000000.0")));
  expect_error(ExitCode::kUsage, {"rope_theta", "10000"},
               [&] { check_resumable(state, old, state, current("10000.0")); });
}

// Such as "scoring_func" and "tie_word_embeddings", which an export always says.
TEST(TrainerStateTest, AnExportIsOfTheSameModel) {
  const TrainerState state;
  for (const char* type : {"qwen3_moe", "deepseek_v3", "gpt_oss"}) {
    const Json config = Json::parse(
        fmt::format(R"({{"model_type": "{}", "rope_theta": 1e6, "quantization_config": {{}}}})", type), "old");
    const Json exported = Json::parse(hub_config(config, at::kFloat, 5), "exported");
    EXPECT_NO_THROW(check_resumable(state, config, state, exported));
    EXPECT_NO_THROW(check_resumable(state, exported, state, config));
  }
}

}  // namespace
}  // namespace marrow
