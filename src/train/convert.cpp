#include "train/convert.h"

#include <filesystem>

#include "data/tokenizer.h"
#include "models/model_contract.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kImportElements = int64_t{1} << 24;
constexpr const char* kGenerationConfig = "generation_config.json";

// Its text, or "" where the folder has none.
std::string generation_config_of(const std::string& folder) {
  const std::string path = (fs::path(folder) / kGenerationConfig).string();
  return fs::exists(path) ? read_text_file(path) : "";
}

// What is known of an imported model: its tokenizer.
TrainerState imported_state(const std::string& hub, const std::vector<SideFile>& tokenizer_files) {
  TrainerState state;
  if (tokenizer_files.empty() || !fs::exists(fs::path(hub) / "tokenizer.json")) return state;
  const bool bytes = is_bytes_tokenizer(tokenizer_files);
  const auto tokenizer = open_tokenizer(bytes ? "bytes" : hub);
  state.tokenizer = bytes ? "bytes" : "tokenizer.json";
  state.tokenizer_hash = tokenizer->hash();
  state.end_of_document = tokenizer->end_of_document().value_or(-1);
  return state;
}

void copy_weights(const ModelWeights& weights, const std::vector<HubTensor>& model,
                  CheckpointFiles& files) {
  const at::Tensor buffer = at::empty({kImportElements}, at::kFloat);
  for (const HubTensor& tensor : model) {
    for (int64_t done = 0; done < tensor.elements(); done += kImportElements) {
      const at::Tensor part =
          buffer.narrow(0, 0, std::min(kImportElements, tensor.elements() - done));
      weights.read(tensor, done, part);
      files.write(tensor.name, done, part);
    }
  }
}

}  // namespace

int64_t export_checkpoint(const Checkpoint& checkpoint, const std::string& output,
                          TensorDtype dtype) {
  const auto model = open_model(checkpoint.config());
  const std::vector<HubTensor> tensors = all_hub_tensors(*model);
  const ModelWeights weights(checkpoint.folder(), tensors,
                             {.tied_embeddings = model->shape().tied_embeddings});
  HubExport to{.output = output, .config = checkpoint.config(), .model = tensors, .dtype = dtype};
  to.end_of_document = checkpoint.state().end_of_document;
  to.tokenizer_files = checkpoint.state().tokenizer == "bytes" ? bytes_tokenizer_files()
                                                               : checkpoint.tokenizer_files();
  to.generation_config = generation_config_of(checkpoint.folder());
  return write_hub_folder(to, weights);
}

std::vector<std::string> import_hub_folder(const std::string& hub, const std::string& output,
                                           bool allow_unknown) {
  check_output_is_new(output, "--output");
  const std::string config_path = (fs::path(hub) / "config.json").string();
  const Json config = Json::read_file(config_path, ExitCode::kUsage);
  const auto model = open_model(config);
  const std::vector<HubTensor> tensors = all_hub_tensors(*model);
  const ModelWeights weights(
      hub, tensors,
      {.tied_embeddings = model->shape().tied_embeddings, .allow_unknown = allow_unknown});

  std::vector<SideFile> side_files = read_tokenizer_files(hub);
  side_files.push_back({"trainer_state.json", to_json(imported_state(hub, side_files)) + "\n"});
  side_files.push_back({"config.json", read_text_file(config_path)});
  if (const std::string text = generation_config_of(hub); !text.empty()) {
    side_files.push_back({kGenerationConfig, text});
  }

  std::vector<CheckpointTensor> entries;
  for (const HubTensor& tensor : tensors) entries.push_back({tensor, false, false});
  CheckpointFiles files(output, entries, TensorDtype::kF32);
  files.create();
  copy_weights(weights, tensors, files);
  files.finish_writing(0);
  files.publish(side_files, 1);
  return weights.ignored();
}

}  // namespace marrow
