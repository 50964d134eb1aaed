// Small training runs on any mesh, and how two of them differ: for the programs in this folder.
#pragma once
#include <string>
#include <vector>

#include "parallel/mesh.h"
#include "train/pretrain_config.h"

namespace marrow {
class Bootstrap;
}

namespace marrow::test {

struct Setting {
  MeshShape mesh;
  OptimizerName optimizer = OptimizerName::kAdamW;
  BalanceMode balance = BalanceMode::kGlobal;
  PipelineSchedule schedule = PipelineSchedule::kDualPipeV;
  Recompute recompute = Recompute::kNone;
  bool tied = false, documents = false, overlap = true, by_layer = false, gpu = false;
  bool deterministic = false, fp8 = false;
  int64_t micro_batch = 1, steps = 5, seed = 3;
  std::string family = "qwen3_moe";
  std::vector<int64_t> experts = {};  // all tokens go to these; empty: natural routing

  // pp · dp · ep = 8 needs more micro-batches and layers.
  bool large() const { return mesh.pp > 2 || mesh.pp * mesh.dp * mesh.ep > 4 || mesh.world() % 3 == 0; }
  int64_t layers() const { return large() ? 8 : 4; }
  int64_t sequences() const { return mesh.world() % 3 == 0 ? 24 : large() ? 16 : 8; }
  std::string model_text() const;  // what one process needs to know of it
  std::string text() const;
};

// The corpus and the models' config.json files that run_config names.
void write_inputs(const std::string& root);
PretrainConfig run_config(const std::string& root, const std::string& name, const Setting& setting);
void run(const PretrainConfig& config, Bootstrap& bootstrap);

// The largest relative difference of a run from the reference, and of what.
struct Difference {
  double worst = 0;
  std::string what;
  void see(double difference, const std::string& of);
};
void compare_metrics(const std::string& folder, const std::string& reference, Difference& difference);
// After `step` steps.
void compare_parameters(const std::string& folder, const std::string& reference, int64_t step, Difference& difference);

}  // namespace marrow::test
