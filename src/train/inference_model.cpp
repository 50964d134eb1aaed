#include "train/inference_model.h"

#include "models/hub_folder.h"
#include "pipeline/model_setup.h"
#include "train/checkpoint.h"

namespace marrow {

InferenceModel::InferenceModel(const std::string& path, bool use_gpu, Logger& logger)
    : folder_(path), device_(use_gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU)) {
  if (is_checkpoint_path(path)) {
    const Checkpoint checkpoint = open_checkpoint(path, logger);
    folder_ = checkpoint.folder();
    trained_seq_len_ = checkpoint.state().seq_len;
    tokenizer_hash_ = checkpoint.state().tokenizer_hash;
  } else {
    tokenizer_hash_ = marrow::tokenizer_hash(folder_);
  }
  model_ = open_model(Json::read_file(folder_ + "/config.json"));

  ParameterStore::Options options;
  options.device = device_;
  options.working_dtype = use_gpu ? at::kBFloat16 : at::kFloat;
  options.training = false;
  store_.emplace(options);
  add_model_parameters(*model_, {}, *store_);
  load_weights(*model_, folder_, *store_);
  executor_.emplace(*model_, ModelParts{}, *store_, nullptr, Executor::Options{});
}

std::unique_ptr<Tokenizer> InferenceModel::open_own_tokenizer() const {
  MARROW_CHECK(!marrow::tokenizer_hash(folder_).empty(), ExitCode::kBadInput,
               Fix("copy tokenizer.json and tokenizer_config.json into the folder"), "{} holds no tokenizer", folder_);
  return open_tokenizer(folder_);
}

}  // namespace marrow
