#include "train/inference_model.h"

#include "models/hub_folder.h"
#include "pipeline/model_setup.h"
#include "train/checkpoint.h"

namespace marrow {

InferenceModel::InferenceModel(const std::string& path, bool use_gpu, Logger& logger)
    : folder_(path), device_(use_gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU)) {
  std::optional<Checkpoint> checkpoint;
  if (is_checkpoint_path(path)) {
    checkpoint.emplace(open_checkpoint(path, logger));
    folder_ = checkpoint->folder();
    trained_seq_len_ = checkpoint->state().seq_len;
    tokenizer_hash_ = checkpoint->state().tokenizer_hash;
  }
  model_ = open_model(checkpoint ? checkpoint->config() : Json::read_file(path + "/config.json"));

  ParameterStore::Options options;
  options.device = device_;
  options.working_dtype = use_gpu ? at::kBFloat16 : at::kFloat;
  options.training = false;
  store_.emplace(options);
  add_model_parameters(*model_, *store_);
  const std::vector<OwnedRange> ranges = store_->owned_ranges();
  const bool tied = model_->shape().tied_embeddings;
  if (checkpoint) {
    checkpoint->load_weights(all_hub_tensors(*model_), tied, ranges);
  } else {
    WeightRules rules;
    rules.tied_embeddings = tied;
    const ModelWeights weights(path, all_hub_tensors(*model_), rules);
    for (const OwnedRange& range : ranges) weights.read(*range.tensor, range.begin, range.master);
  }
  store_->copy_masters_to_working();
  executor_.emplace(*model_, store_->table(), nullptr, device_, Executor::Options{});
}

std::unique_ptr<Tokenizer> InferenceModel::open_own_tokenizer() const {
  const std::vector<SideFile> files = read_tokenizer_files(folder_);
  MARROW_CHECK(!files.empty(), ExitCode::kBadInput,
               Fix("copy tokenizer.json and tokenizer_config.json into the folder"), "{} holds no tokenizer", folder_);
  return open_tokenizer(is_bytes_tokenizer(files) ? "bytes" : folder_);
}

}  // namespace marrow
