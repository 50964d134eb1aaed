// marrow import: a Hugging Face folder as a checkpoint of step 0 without optimizer state.
#include <filesystem>

#include "app/command_line.h"
#include "data/tokenizer.h"
#include "models/model_contract.h"
#include "train/checkpoint.h"

namespace marrow {
namespace {

namespace fs = std::filesystem;

// What is known of an imported model: its tokenizer.
TrainerState imported_state(const std::string& hub) {
  TrainerState state;
  if (!fs::exists(hub + "/tokenizer.json")) return state;
  const auto tokenizer = open_tokenizer(hub);
  state.tokenizer = tokenizer->name() == "bytes" ? "bytes" : "tokenizer.json";
  state.tokenizer_hash = tokenizer->hash();
  state.end_of_document = tokenizer->end_of_document().value_or(-1);
  return state;
}

int run_import(const CommandLine& args) {
  const std::string& hub = args.positional();
  const std::string output = args.text("output");
  check_output_is_new(output, "--output");
  const auto model = open_model(Json::read_file(hub + "/config.json", ExitCode::kUsage));
  const std::vector<HubTensor> tensors = all_hub_tensors(*model);
  const ModelWeights weights(hub, tensors,
                             {.tied_embeddings = model->shape().tied_embeddings,
                              .allow_unknown = args.has("allow-unknown"),
                              .text_only = args.has("text-only")});

  std::vector<SideFile> side_files = read_tokenizer_files(hub);
  side_files.push_back({"trainer_state.json", to_json(imported_state(hub)) + "\n"});
  for (const std::string name : {"config.json", "generation_config.json"}) {
    const std::string path = hub + "/" + name;
    if (fs::exists(path)) side_files.push_back({name, read_text_file(path)});
  }
  std::vector<CheckpointTensor> entries;
  for (const HubTensor& tensor : tensors) entries.push_back({tensor, false, false});
  CheckpointFiles files(output, entries, at::kFloat);
  files.open();
  for (const HubTensor& tensor : tensors) {
    weights.read_in_parts(tensor, at::kFloat,
                          [&](int64_t begin, const at::Tensor& part) { files.write(tensor.name, begin, part); });
  }
  files.finish_writing();
  files.publish(side_files);
  for (const std::string& name : weights.ignored()) {
    args.logger().warn(fmt::format("left out tensor {}, which the model lacks", name));
  }
  args.print(fmt::format("imported {} as checkpoint {}", hub, output),
             JsonWriter().field("output", output, "ignored", weights.ignored()));
  return 0;
}

}  // namespace

Subcommand import_command() {
  return {.name = "import",
          .summary = "a Hugging Face folder as a checkpoint",
          .positionals = {"HF_DIR"},
          .options = {{"--output CHECKPOINT", "the checkpoint's own folder; must not exist yet"},
                      {"[--allow-unknown]", "leave out tensors that the model lacks (they are listed)"},
                      {"[--text-only]", "of a model of text and images, take the language model alone"}},
          .example = "marrow import Qwen3-30B-A3B --output checkpoints/qwen3",
          .notes = "Train from it with model.init_from = \"CHECKPOINT\".",
          .run = run_import};
}

}  // namespace marrow
