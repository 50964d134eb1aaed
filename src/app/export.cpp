// marrow export: a checkpoint as a folder that transformers, vLLM and SGLang load.
#include <filesystem>

#include "app/command_line.h"
#include "data/tokenizer.h"
#include "models/model_contract.h"
#include "train/checkpoint.h"

namespace marrow {
namespace {

int run_export(const CommandLine& args) {
  const Checkpoint checkpoint = open_checkpoint(args.positional(), args.logger());
  const auto model = open_model(checkpoint.config());
  const std::vector<HubTensor> tensors = all_hub_tensors(*model);
  const ModelWeights weights(checkpoint.folder(), tensors, {.tied_embeddings = model->shape().tied_embeddings});
  HubExport to{.output = args.text("output"), .config = checkpoint.config(), .model = tensors};
  to.dtype = args.text("dtype") == "bf16" ? at::kBFloat16 : at::kFloat;
  to.end_of_document = checkpoint.state().end_of_document;
  to.tokenizer_files =
      checkpoint.state().tokenizer == "bytes" ? bytes_tokenizer_files() : read_tokenizer_files(checkpoint.folder());
  const std::string generation = checkpoint.folder() + "/generation_config.json";
  if (std::filesystem::exists(generation)) to.generation_config = read_text_file(generation);
  const int64_t bytes = write_hub_folder(to, weights);
  args.print(fmt::format("exported {} (step {}, {}, {} bytes) to {}", checkpoint.folder(), checkpoint.state().step,
                         args.text("dtype"), bytes, to.output),
             JsonWriter().field("output", to.output, "checkpoint", checkpoint.folder(), "step", checkpoint.state().step,
                                "dtype", args.text("dtype"), "bytes", bytes));
  return 0;
}

}  // namespace

Subcommand export_command() {
  return {.name = "export",
          .summary = "a checkpoint as a Hugging Face folder",
          .positionals = {"CHECKPOINT"},
          .options = {{"--output HF_DIR", "folder to write; must not exist yet"},
                      {"[--dtype fp32|bf16]", "of the weights", "fp32"}},
          .example = "marrow export runs/tiny/checkpoints/step-00000200 --output exported",
          .notes = "CHECKPOINT may also be a run's folder: its newest complete checkpoint is taken.",
          .run = run_export};
}

}  // namespace marrow
