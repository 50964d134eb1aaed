// RUN.toml, read strictly: every key, its type, range and default in one place.
#pragma once
#include "data/batch_loader.h"
#include "models/model_contract.h"
#include "parallel/mesh.h"
#include "pipeline/pipeline_schedule.h"
#include "pipeline/router_balance.h"

namespace marrow {

enum class LearningRateSchedule { kWsd, kCosine, kConstant };
enum class OptimizerName { kAdamW, kMuon };
enum class Recompute { kNone, kCheap, kLayer };
enum class TrainDtype { kBf16, kFp32, kFp8 };  // kFp8: bf16, with products of weights in E4M3
inline constexpr const char* kTrainDtypeNames[] = {"bf16", "fp32", "fp8"};
inline const char* dtype_name(TrainDtype dtype) { return kTrainDtypeNames[static_cast<size_t>(dtype)]; }
enum class TrainDevice { kCpu, kGpu };
enum class ShardMode { kStep, kLayer };

struct PretrainConfig {
  struct Model {
    std::string config;     // path of a Hugging Face config.json
    std::string init_from;  // checkpoint or Hugging Face folder; "" = random
  } model;
  struct Data {
    std::vector<CorpusWeight> train;
    std::vector<std::string> validation;
    int64_t seq_len = 1024;
    int64_t validate_every = 0;  // steps; 0 = only after the last step
    int64_t validate_sequences = 64;
    bool mask_documents = false;
  } data;
  struct MeshSizes : MeshShape {  // 0 = "auto": what the other dimensions leave
    MeshSizes() { dp = 0; }
    ShardMode shard = ShardMode::kStep;
    PipelineSchedule schedule = PipelineSchedule::kDualPipeV;
  } mesh;
  struct Train {
    int64_t steps = 0;
    int64_t global_batch = 0;  // sequences
    int64_t micro_batch = 1;   // sequences
    int64_t seed = 0;
    TrainDevice device = TrainDevice::kCpu;  // resolved: a GPU where there is one
    TrainDtype dtype = TrainDtype::kFp32;    // resolved: bf16 on a GPU
    bool fp8_at_any_size = false;            // also where bf16 is faster
    bool deterministic = false;
    Recompute recompute = Recompute::kNone;
    bool overlap = true;
    int64_t skip_nonfinite = 0;  // steps with a non-finite gradient to skip before stopping
    int64_t cpu_threads = 0;     // 0 = cores / ranks
  } train;
  struct Optimizer {
    OptimizerName name = OptimizerName::kAdamW;
    double lr = 0.0;
    LearningRateSchedule schedule = LearningRateSchedule::kWsd;
    int64_t warmup_steps = 0;
    int64_t decay_steps = 0;  // wsd: the last steps fall linearly; cosine: length of the fall
    double min_lr = 0.0;      // absolute
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    double muon_momentum = 0.95;
    double weight_decay = 0.1;
    double clip_norm = 1.0;  // 0 = no clipping
    TrainDtype state_dtype = TrainDtype::kFp32;
  } optimizer;
  struct Router {
    BalanceMode balance = BalanceMode::kGlobal;
    double coef = -1.0;  // < 0: the model's router_aux_loss_coef, else 1e-3
    double z_loss = 0.0;
    bool forced = false;  // routes tokens evenly whatever the logits: for speed measurements
  } router;
  struct Checkpoint {
    std::string dir;    // default: LOG_DIR/checkpoints
    int64_t every = 0;  // steps; 0 = only the last step
    int64_t keep = 2;   // newest complete ones kept; 0 = all
    bool async = true;
    bool resume = true;
  } checkpoint;
  struct Log {
    std::string dir;  // default: runs/ + the config's file name
    int64_t every = 1;
    std::vector<int64_t> trace;  // steps to trace
    bool memory_trace = false;
    double watchdog_seconds = 600;
  } log;
  struct Origin {
    std::string path;                           // "run.toml"
    std::map<std::string, std::string> places;  // of the given keys: "mesh.ep" is at "run.toml:9:6"
  } origin;
};

// Reads `path` with `overrides` ("train.steps=10", values in TOML) applied after it. `have_gpu` resolves the defaults
// of device and dtype. Relative paths stay relative to the working folder. `needs_inputs` as in check_config. Errors
// (kUsage): file:line:column, the key, the nearest valid key or the valid range.
PretrainConfig read_pretrain_config(const std::string& path, const std::vector<std::string>& overrides, bool have_gpu,
                                    bool needs_inputs = true);

// What must hold between the keys, apart from each key's own range and the mesh. Errors (kUsage) name the keys, their
// values and the nearest ones that fit. Without `needs_inputs` (plans) corpora and init_from need not exist.
void check_config(const PretrainConfig& config, bool needs_inputs = true);

// Puts in the "auto" dimension and checks the mesh against the number of processes, and the batch sizes against the
// mesh. Errors (kUsage) name the nearest sizes that fit, and go with the model's shape.
void resolve_mesh(PretrainConfig& config, int64_t world, const ModelShape& shape);
// resolve_mesh, and what must hold between a run's config and its model. Errors say where the keys stand.
void check_model_fits(PretrainConfig& config, const ModelShape& shape, int64_t world);

// With the places of the keys that the error names.
Error& locate(Error& error, const PretrainConfig& config);
std::string mesh_text(const PretrainConfig::MeshSizes& mesh);  // "pp 2 x dp 1 x cp 1 x ep 4"

// Every key with its default, valid values and meaning: `marrow pretrain --help-config`.
std::string config_help();

// The resolved config as TOML that read_pretrain_config reads back to the same values.
std::string to_toml(const PretrainConfig& config);
// "train.steps = 20", …: those of `now`'s settings that `before`, such a TOML, does not have.
std::vector<std::string> changed_settings(const std::string& before, const PretrainConfig& now);

}  // namespace marrow
