// Every mesh of this many processes against one process: loss, gradient norm, parameters and moments of five steps.
// Run by ctest under mpirun: test_mesh [FILTER] [gpu]; or test_mesh races STEPS [gpu]: with overlap and random
// delays against neither, equal to the bit. One line a run; the last line is PASS or FAIL.
#include <unistd.h>

#include <filesystem>

#include "mesh/mesh_runs.h"
#include "mesh/router_probe.h"
#include "mesh/stressed_communicators.h"
#include "ops/pch.h"
#include "parallel/bootstrap.h"

namespace marrow::test {
namespace {

namespace fs = std::filesystem;

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

// Each mesh with each optimizer and balance mode, and once with what else a run may ask for.
std::vector<Setting> settings(int64_t world) {
  std::vector<Setting> list;
  constexpr std::array modes{BalanceMode::kGlobal, BalanceMode::kMicro, BalanceMode::kSequence, BalanceMode::kNone};
  size_t turn = 0;
  for (const MeshShape& mesh : meshes(world)) {
    for (const BalanceMode mode : modes) {
      for (const OptimizerName optimizer : {OptimizerName::kAdamW, OptimizerName::kMuon}) {
        list.push_back({mesh, optimizer, mode});
      }
    }
    Setting special{mesh};
    special.documents = turn % 3 == 0;
    special.recompute = turn % 5 % 2 == 0 ? Recompute::kCheap : Recompute::kLayer;
    special.tied = turn % 3 != 1;
    special.overlap = turn % 2 == 0;
    if (mesh.pp > 1 && !special.tied) special.schedule = PipelineSchedule::kOneFOneB;
    if (mesh.dp > 1) special.mesh.replicate = mesh.dp;
    special.by_layer = turn % 2 == 1;
    // One process takes one sequence at a time.
    const int64_t pairs = special.sequences() / (2 * mesh.dp * mesh.ep);
    if (pairs >= 2 * mesh.pp || (mesh.pp == 1 && pairs > 0)) special.micro_batch = 2;
    list.push_back(special);
    // The other families on two ranks, with all that their layers have.
    if (world == 2) {
      Setting other{mesh, OptimizerName::kMuon};
      other.family = "gpt_oss";
      other.documents = mesh.cp > 1;
      other.by_layer = mesh.dp > 1;
      other.recompute = turn % 2 == 0 ? Recompute::kCheap : Recompute::kLayer;
      list.push_back(other);
      Setting latent{mesh};  // each mesh of two with another of what this family adds
      latent.family = mesh.dp > 1 ? "deepseek_v2" : "deepseek_v3";
      latent.balance = mesh.cp > 1 ? BalanceMode::kSequence : mesh.dp > 1 ? BalanceMode::kGlobal : BalanceMode::kBias;
      latent.documents = mesh.cp > 1;
      latent.recompute = mesh.ep > 1 ? Recompute::kLayer : Recompute::kCheap;
      latent.by_layer = mesh.dp > 1;
      latent.optimizer = mesh.pp > 1 ? OptimizerName::kMuon : OptimizerName::kAdamW;
      list.push_back(latent);
      // In bf16 other orders of adding change routes; these two meshes have none within a micro-batch.
      Setting rough{mesh};
      rough.fp8 = true;
      rough.by_layer = mesh.dp > 1;
      rough.recompute = mesh.pp > 1 ? Recompute::kCheap : Recompute::kLayer;
      if (mesh.cp == 1 && mesh.ep == 1) list.push_back(rough);
    }
    for (const bool documents : {false, true}) {  // recurrent layers, with both where context ranks share sequences
      if (world == 1 || world > 4 || (mesh.cp == 1 && (world > 2 || !documents))) continue;
      Setting recurrent{mesh};
      recurrent.family = "qwen3_5_moe_text";
      recurrent.documents = documents;
      recurrent.tied = mesh.ep > 1;
      recurrent.by_layer = mesh.dp > 1 || documents;
      recurrent.recompute = documents ? Recompute::kLayer : Recompute::kCheap;
      recurrent.optimizer = documents ? OptimizerName::kMuon : OptimizerName::kAdamW;
      list.push_back(recurrent);
    }
    ++turn;
    // All tokens on the first experts, then on the last: most ranks have none.
    if (mesh.ep != world || world == 1) continue;
    for (const std::vector<int64_t>& experts : {std::vector<int64_t>{0, 1}, {6, 7}}) {
      Setting skewed{mesh};
      skewed.experts = experts;
      if (experts[0] == 6) skewed.recompute = Recompute::kLayer;
      skewed.by_layer = experts[0] == 6;
      skewed.steps = 20;
      list.push_back(skewed);
    }
  }
  return list;
}

std::string common_folder(Bootstrap& bootstrap) {
  const bool first = bootstrap.rank() == 0;
  std::string root = bootstrap.broadcast(
      first ? fmt::format("{}/marrow-mesh-{}", fs::temp_directory_path().string(), getpid()) : "", 0);
  if (first) write_inputs(root);
  bootstrap.barrier();
  return root;
}

// One process's runs, and the seeds with which no routing is so close that rounding could change it.
class References {
 public:
  explicit References(std::string root) : root_(std::move(root)) {}
  std::string folder(const Setting& setting) const {
    return fmt::format("{}/one {} {}", root_, setting.sequences(), setting.model_text());
  }
  int64_t seed(Setting setting) {
    int64_t& seed = seeds_[folder(setting)];
    setting.micro_batch = 1;
    setting.recompute = Recompute::kNone;
    for (setting.seed = 3; seed == 0; ++setting.seed) {
      fs::remove_all(folder(setting));
      PretrainConfig config = run_config(root_, fs::path(folder(setting)).filename(), setting);
      config.mesh = {};
      config.mesh.dp = 1;
      Bootstrap alone;
      take_least_router_gap();
      run(config, alone);
      if (take_least_router_gap() >= 1e-5) seed = setting.seed;
    }
    return seed;
  }

 private:
  std::string root_;
  std::map<std::string, int64_t> seeds_;
};

int test_all(Bootstrap& bootstrap, const std::string& filter, bool gpu) {
  const bool first = bootstrap.rank() == 0;
  const std::string root = common_folder(bootstrap);
  References references(root);
  int64_t failed = 0, runs = 0;
  for (Setting setting : settings(bootstrap.size())) {
    setting.gpu = gpu;
    if (setting.text().find(filter) == std::string::npos) continue;
    force_router(setting.experts);
    const std::string reference = references.folder(setting);
    setting.seed = std::stoll(bootstrap.broadcast(first ? std::to_string(references.seed(setting)) : "", 0));
    const auto start = std::chrono::steady_clock::now();
    const PretrainConfig config = run_config(root, setting.text(), setting);
    run(config, bootstrap);
    ++runs;
    if (!first) continue;
    Difference values, parameters;
    compare_metrics(config.log.dir, reference, values);
    compare_parameters(config.log.dir, reference, setting.steps, parameters);
    const double limit = gpu || setting.optimizer == OptimizerName::kMuon ? 1e-4 : 1e-5;
    const bool good = values.worst <= limit && parameters.worst <= limit;
    failed += good ? 0 : 1;
    fmt::print("{} {}: {:.1e} ({}), parameters {:.1e} ({}), {:.1f} s\n", good ? "ok" : "WRONG", setting.text(),
               values.worst, values.what, parameters.worst, parameters.what,
               std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
    fs::remove_all(config.log.dir);
  }
  bootstrap.barrier();
  if (!first) return 0;
  fs::remove_all(root);
  fmt::print("{} {} processes: {} runs, {} differ from one process\n", failed == 0 && runs > 0 ? "PASS" : "FAIL",
             bootstrap.size(), runs, failed);
  return failed == 0 && runs > 0 ? 0 : 1;
}

// What overlaps, with every operation late at random, against the same actions one after the other.
int test_races(Bootstrap& bootstrap, int64_t steps, bool gpu) {
  const bool first = bootstrap.rank() == 0;
  const std::string root = common_folder(bootstrap);
  std::vector<MeshShape> shapes = meshes(bootstrap.size());
  if (bootstrap.size() == 8) shapes = {{2, 1, 2, 2}};
  int64_t failed = 0;
  for (const MeshShape& mesh : shapes) {
    Setting setting{mesh};
    setting.gpu = gpu;
    setting.steps = steps;
    setting.deterministic = true;
    const auto run_as = [&](bool overlap) {
      setting.overlap = overlap;
      set_random_delays(overlap);
      const PretrainConfig config = run_config(root, setting.text(), setting);
      run(config, bootstrap);
      return config.log.dir;
    };
    const std::string plain = run_as(false), late = run_as(true);
    if (!first) continue;
    Difference difference;
    compare_metrics(late, plain, difference);
    compare_parameters(late, plain, steps, difference);
    const bool same = difference.worst == 0;
    failed += same ? 0 : 1;
    fmt::print("{} {}: {} steps, {:.1e} ({})\n", same ? "ok" : "WRONG", setting.text(), steps, difference.worst,
               difference.what);
    std::fflush(stdout);
  }
  bootstrap.barrier();
  if (!first) return 0;
  fs::remove_all(root);
  fmt::print("{} {} processes: {} runs, {} differ from the run without overlap\n", failed == 0 ? "PASS" : "FAIL",
             bootstrap.size(), shapes.size(), failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace marrow::test

int main(int argc, char** argv) try {
  std::vector<std::string> words(argv + 1, argv + argc);
  const auto take = [&](std::string_view word) { return std::erase(words, word) > 0; };
  const bool gpu = take("gpu"), races = take("races");
  const std::string rest = words.empty() ? "" : words[0];
  const auto bootstrap = marrow::make_bootstrap();
  return races ? marrow::test::test_races(*bootstrap, std::stoll(rest), gpu)
               : marrow::test::test_all(*bootstrap, rest, gpu);
} catch (const marrow::Error& error) {
  std::fputs(error.to_text().c_str(), stderr);
  _exit(1);  // the launcher ends the other ranks
}
