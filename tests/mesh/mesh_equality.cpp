// Every mesh of this many processes against one process: loss, gradient norm and parameters of five
// steps. Run by ctest under mpirun: test_mesh [FILTER [gpu]]. One line a run; the last line is PASS or FAIL.
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "base/json.h"
#include "data/indexed_corpus.h"
#include "models/hub_folder.h"
#include "models/safetensors.h"
#include "ops/pch.h"
#include "parallel/bootstrap.h"
#include "train/checkpoint_files.h"
#include "train/pretrain_loop.h"

namespace marrow::test {
namespace {

namespace fs = std::filesystem;

struct Setting {
  MeshShape mesh;
  OptimizerName optimizer = OptimizerName::kAdamW;
  BalanceMode balance = BalanceMode::kGlobal;
  PipelineSchedule schedule = PipelineSchedule::kDualPipeV;
  bool tied = false, documents = false, recompute = false, overlap = true, by_layer = false, gpu = false;

  // pp · dp · ep = 8 needs more micro-batches and layers.
  bool large() const { return mesh.pp > 2 || mesh.pp * mesh.dp * mesh.ep > 4 || mesh.world() % 3 == 0; }
  int64_t layers() const { return large() ? 8 : 4; }
  int64_t sequences() const { return mesh.world() % 3 == 0 ? 24 : large() ? 16 : 8; }
  std::string model_text() const {
    constexpr const char* balances[] = {"none", "micro", "sequence", "global", "bias"};
    return fmt::format("{} {}{}{}{}", optimizer == OptimizerName::kMuon ? "muon" : "adamw",
                       balances[static_cast<size_t>(balance)], tied ? " tied" : "", documents ? " documents" : "",
                       recompute ? " recompute" : "");
  }
  std::string text() const {
    return fmt::format("pp{} dp{} cp{} ep{}{} {}{}{}{}", mesh.pp, mesh.dp, mesh.cp, mesh.ep,
                       mesh.replicate > 1 ? fmt::format(" replicate{}", mesh.replicate) : "", model_text(),
                       schedule == PipelineSchedule::kOneFOneB ? " 1f1b" : "", overlap ? "" : " no-overlap",
                       by_layer ? " shard-layer" : "");
  }
};

std::string model_config(const Setting& setting) {
  return fmt::format(
      R"({{"model_type": "qwen3_moe", "num_hidden_layers": {}, "hidden_size": 64, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
"vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
"norm_topk_prob": true, "tie_word_embeddings": {}, "initializer_range": 0.05}})",
      setting.layers(), setting.tied);
}

PretrainConfig run_config(const std::string& root, const std::string& name, const Setting& setting) {
  PretrainConfig config;
  config.model.config = fmt::format("{}/model-{}-{}.json", root, setting.layers(), setting.tied ? "tied" : "untied");
  config.data.train = {{root + "/corpus", 1.0}};
  config.data.validation = {root + "/corpus"};
  config.data.validate_sequences = 5;  // divides by no number of ranks
  config.data.seq_len = 32;
  config.data.mask_documents = setting.documents;
  config.mesh = {setting.mesh.pp, setting.mesh.dp, setting.mesh.cp, setting.mesh.ep, setting.mesh.replicate};
  config.mesh.schedule = setting.schedule;
  config.train.steps = 5;
  config.train.global_batch = setting.sequences();
  config.train.seed = 3;
  config.train.cpu_threads = 1;
  if (setting.gpu) config.train.device = TrainDevice::kGpu;
  config.train.overlap = setting.overlap;
  if (setting.by_layer) config.mesh.shard = ShardMode::kLayer;
  if (setting.recompute) config.train.recompute = Recompute::kLayer;
  config.optimizer.name = setting.optimizer;
  config.optimizer.lr = 2e-3;
  config.optimizer.eps = 1e-3;  // a smaller one turns the first step into a sign, and hides scales
  config.router.balance = setting.balance;
  config.router.coef = 0.05;
  config.router.z_loss = 1e-3;
  config.checkpoint.async = false;
  config.log.dir = root + "/" + name;
  config.checkpoint.dir = config.log.dir + "/checkpoints";
  config.log.watchdog_seconds = 60;
  return config;
}

void run(const PretrainConfig& config, Bootstrap& bootstrap) {
  Logger logger;
  logger.set_quiet(true);
  StopSignal stop;
  RunRecords records(/*json=*/false);
  PretrainLoop loop(config, bootstrap, records, logger);
  loop.run(stop);
}

std::vector<Json> metrics(const std::string& folder) {
  std::vector<Json> lines;
  std::ifstream file(folder + "/metrics.jsonl");
  for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line, folder, ExitCode::kBadInput));
  return lines;
}

// The largest relative difference of a run from the reference, and of what.
struct Difference {
  double worst = 0;
  std::string what;
  void see(double difference, const std::string& of) {
    if (difference > worst || std::isnan(difference)) worst = difference, what = of;
  }
};

void compare_metrics(const std::string& folder, const std::string& reference, Difference& difference) {
  const std::vector<Json> ours = metrics(folder), theirs = metrics(reference);
  MARROW_CHECK(ours.size() == theirs.size(), ExitCode::kBadInput, Fix("see the runs"), "{} lines against {}",
               ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    for (const char* key : {"loss", "grad_norm", "balance_loss", "validation_loss", "expert_load_max_over_mean"}) {
      if (!theirs[i].has(key)) continue;
      const double a = ours[i].at(key).as_double(), b = theirs[i].at(key).as_double();
      difference.see(std::abs(a - b) / std::abs(b), fmt::format("{} of line {}: {} against {}", key, i + 1, a, b));
    }
  }
}

void compare_parameters(const std::string& folder, const std::string& reference, Difference& difference) {
  const std::string step = "/checkpoints/step-00000005";
  const TensorFiles ours(tensor_paths(folder + step, "")), theirs(tensor_paths(reference + step, ""));
  for (const std::string& name : theirs.names()) {
    const at::Tensor a = ours.read_whole(name).to(at::kDouble), b = theirs.read_whole(name).to(at::kDouble);
    // A tensor of zeros has no scale of its own.
    difference.see((a - b).norm().item<double>() / std::max(b.norm().item<double>(), 1e-12), name);
  }
}

// All meshes of `world` ranks with pp ≤ 4.
std::vector<MeshShape> meshes(int64_t world) {
  std::vector<MeshShape> found;
  for (int64_t pp = 1; pp <= 4; ++pp) {
    for (int64_t dp = 1; dp <= world; ++dp) {
      for (int64_t cp = 1; cp <= world; ++cp) {
        for (int64_t ep = 1; ep <= 8; ++ep) {
          if (pp * dp * cp * ep == world && 8 % ep == 0 && 32 % (2 * cp) == 0) found.push_back({pp, dp, cp, ep});
        }
      }
    }
  }
  return found;
}

// Each mesh with each optimizer and each balance mode at least once over the list; all of them where
// the world is small.
std::vector<Setting> settings(int64_t world) {
  std::vector<Setting> list;
  constexpr std::array modes{BalanceMode::kGlobal, BalanceMode::kMicro, BalanceMode::kSequence, BalanceMode::kNone};
  size_t turn = 0;
  for (const MeshShape& mesh : meshes(world)) {
    for (size_t i = 0; i < (world <= 2 ? modes.size() : 1); ++i, ++turn) {
      list.push_back({mesh, OptimizerName::kAdamW, modes[turn % 4]});
      list.push_back({mesh, OptimizerName::kMuon, modes[(turn + 1 + turn / 4) % 4]});
    }
    Setting special{mesh};
    special.documents = turn % 3 == 0;
    special.recompute = turn % 3 == 1;
    special.tied = turn % 3 != 1;
    special.overlap = turn % 2 == 0;
    if (mesh.pp > 1 && !special.tied) special.schedule = PipelineSchedule::kOneFOneB;
    if (mesh.dp > 1) special.mesh.replicate = mesh.dp;
    special.by_layer = turn % 2 == 1;
    list.push_back(special);
  }
  return list;
}

void write_inputs(const std::string& root) {
  CorpusWriter writer(root + "/corpus", {"test", "hash", 512, {}}, true);
  uint64_t state = 5;
  for (int document = 0; document < 400; ++document) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < 20 + document % 37; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      tokens.push_back(static_cast<int32_t>((state >> 33) % 512));
    }
    const auto length = static_cast<int32_t>(tokens.size());
    writer.append(tokens, std::span(&length, 1));
  }
  writer.finish();
  for (const int64_t pp : {1, 4}) {
    for (const bool tied : {false, true}) {
      Setting setting;
      setting.mesh.pp = pp;
      setting.tied = tied;
      write_text_file_atomically(run_config(root, "", setting).model.config, model_config(setting));
    }
  }
}

int test_all(Bootstrap& bootstrap, const std::string& filter, bool gpu) {
  const bool first = bootstrap.rank() == 0;
  const std::string root = bootstrap.broadcast(
      first ? fmt::format("{}/marrow-mesh-{}", fs::temp_directory_path().string(), getpid()) : "", 0);
  if (first) write_inputs(root);
  bootstrap.barrier();
  int64_t failed = 0, runs = 0;
  for (Setting setting : settings(bootstrap.size())) {
    setting.gpu = gpu;
    if (setting.text().find(filter) == std::string::npos) continue;
    Bootstrap alone;
    const std::string reference = fmt::format("one {} {}", setting.sequences(), setting.model_text());
    if (first && !fs::exists(root + "/" + reference)) {
      PretrainConfig config = run_config(root, reference, setting);
      config.mesh = {1, 1, 1, 1, 1};
      run(config, alone);
    }
    bootstrap.barrier();
    const auto start = std::chrono::steady_clock::now();
    const PretrainConfig config = run_config(root, setting.text(), setting);
    run(config, bootstrap);
    ++runs;
    if (!first) continue;
    Difference values, parameters;
    compare_metrics(config.log.dir, root + "/" + reference, values);
    compare_parameters(config.log.dir, root + "/" + reference, parameters);
    const double limit = gpu || setting.optimizer == OptimizerName::kMuon ? 1e-4 : 1e-5;
    const bool good = values.worst <= limit && parameters.worst <= limit;
    failed += good ? 0 : 1;
    fmt::print("{} {}: {:.1e} ({}), parameters {:.1e} ({}), {:.1f} s\n", good ? "ok" : "WRONG", setting.text(),
               values.worst, values.what, parameters.worst, parameters.what,
               std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  }
  bootstrap.barrier();
  if (!first) return 0;
  fs::remove_all(root);
  fmt::print("{} {} processes: {} runs, {} differ from one process\n", failed == 0 && runs > 0 ? "PASS" : "FAIL",
             bootstrap.size(), runs, failed);
  return failed == 0 && runs > 0 ? 0 : 1;
}

}  // namespace
}  // namespace marrow::test

int main(int argc, char** argv) try {
  const auto bootstrap = marrow::make_bootstrap();
  return marrow::test::test_all(*bootstrap, argc > 1 ? argv[1] : "", argc > 2 && std::string(argv[2]) == "gpu");
} catch (const marrow::Error& error) {
  std::fputs(error.to_text().c_str(), stderr);
  _exit(1);  // the launcher ends the other ranks
}
