// A trained model opened for evaluation and generation, from a checkpoint or a Hugging Face folder.
#pragma once
#include "base/log.h"
#include "parallel/parameter_store.h"
#include "pipeline/executor.h"
#include "pipeline/router_balance.h"

namespace marrow {

struct InferenceModel {
  // `path`: a checkpoint, a folder of checkpoints (the newest), or a Hugging Face folder. bf16 on a GPU, else fp32.
  InferenceModel(const std::string& path, bool use_gpu, Logger& logger);

  std::string folder;
  at::Device device;
  int64_t trained_seq_len = 0;  // 0: not known
  std::string tokenizer_hash;   // "": not known
  std::unique_ptr<MoeModel> model;
  std::optional<ParameterStore> store;
  std::optional<BalanceTracker> selection;  // holds the biases of selection, where the model has them
  std::optional<Executor> executor;
};

}  // namespace marrow
