#include "train/inference_model.h"

#include "data/tokenizer.h"
#include "pipeline/model_setup.h"
#include "train/checkpoint.h"

namespace marrow {

InferenceModel::InferenceModel(const std::string& path, bool use_gpu, Logger& logger)
    : folder(path), device(use_gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU)) {
  if (is_checkpoint_path(path)) {
    const Checkpoint checkpoint = open_checkpoint(path, logger);
    folder = checkpoint.folder();
    trained_seq_len = checkpoint.state().seq_len;
    tokenizer_hash = checkpoint.state().tokenizer_hash;
  } else {
    tokenizer_hash = marrow::tokenizer_hash(folder);
  }
  model = open_model(Json::read_file(folder + "/config.json", ExitCode::kUsage));
  ParameterStore::Options options;
  options.device = device;
  options.working_dtype = use_gpu ? at::kBFloat16 : at::kFloat;
  options.training = false;
  store.emplace(options);
  add_model_parameters(*model, {}, *store);
  if (!model->shape().selection_biases.empty()) {
    selection.emplace(model->shape(), BalanceTracker::Options{.mode = BalanceMode::kNone}, device);
    selection->begin_step({1, 1, 1});
  }
  load_weights(*model, folder, *store, selection ? selection->bias() : at::Tensor());
  executor.emplace(*model, ModelParts{}, *store, selection ? &*selection : nullptr, Executor::Options{});
}

}  // namespace marrow
