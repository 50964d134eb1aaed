// What each rank of a run will hold, by arithmetic alone: needs neither GPU, corpus nor processes.
#pragma once
#include "models/model_contract.h"
#include "parallel/parameter_store.h"
#include "train/pretrain_config.h"

namespace marrow {

// Bytes. The first three are exact; the rest takes routing as even.
struct RankMemory {
  int64_t parameters = 0, gradients = 0, optimizer = 0;
  int64_t activations = 0;  // at the schedule's peak, with what the layer or head needs that then runs
  int64_t buffers = 0;      // messages, layers under mesh.shard = "layer", the allocator's slack, and `outside`:
  int64_t outside = 0;      // what is not the allocator's: the device's context, NCCL, the process
  int64_t save_copy = 0;    // host memory of an asynchronous save, not in total()
  int64_t total() const { return parameters + gradients + optimizer + activations + buffers; }
};

struct RunEstimate {
  std::vector<RankMemory> ranks;
  double step_seconds = 0;  // bf16 on H200s: the passes alone, no exchange or update; else 0
};

// Of a run whose mesh is resolved. Errors (kUsage): a mesh that does not fit the model.
RunEstimate estimate_run(const MoeModel& model, const PretrainConfig& config);

// How a rank of a run stores parameters; without communicators.
ParameterStore::Options store_options(const PretrainConfig& config, const Mesh& mesh, at::Device device);

}  // namespace marrow
