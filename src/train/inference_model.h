// A trained model opened for evaluation and generation, from a checkpoint or a Hugging Face folder.
#pragma once
#include "base/log.h"
#include "data/tokenizer.h"
#include "parallel/parameter_store.h"
#include "pipeline/executor.h"

namespace marrow {

class InferenceModel {
 public:
  // `path`: a checkpoint, a folder of checkpoints (the newest), or a Hugging Face folder. bf16 on a GPU, fp32 on the
  // CPU.
  InferenceModel(const std::string& path, bool use_gpu, Logger& logger);

  const MoeModel& model() const { return *model_; }
  Executor& executor() { return *executor_; }
  at::Device device() const { return device_; }
  int64_t trained_seq_len() const { return trained_seq_len_; }           // 0: not known
  const std::string& tokenizer_hash() const { return tokenizer_hash_; }  // "": not known
  // The tokenizer that lies beside the weights. Error (kBadInput) where there is none.
  std::unique_ptr<Tokenizer> open_own_tokenizer() const;

 private:
  std::string folder_;
  at::Device device_;
  std::unique_ptr<MoeModel> model_;
  std::optional<ParameterStore> store_;
  std::optional<Executor> executor_;
  int64_t trained_seq_len_ = 0;
  std::string tokenizer_hash_;
};

}  // namespace marrow
