#include "app/subcommands.h"
#include "train/convert.h"

namespace marrow {
namespace {

int run_import(const CommandLine& args) {
  const std::string output = args.text("output");
  const std::vector<std::string> ignored =
      import_hub_folder(args.positional(), output, args.flag("allow-unknown"));
  Logger log;
  for (const std::string& name : ignored) {
    log.warn(fmt::format("left out tensor {}, which the model lacks", name));
  }
  args.print(
      fmt::format("imported {} as checkpoint {}", args.positional(), output),
      JsonWriter().field("output", output).field("ignored", static_cast<int64_t>(ignored.size())));
  return 0;
}

}  // namespace

Subcommand import_command() {
  return {.name = "import",
          .summary = "a Hugging Face folder as a checkpoint",
          .positionals = {"HF_DIR"},
          .options = {{.name = "output",
                       .takes = Takes::kOne,
                       .value = "CHECKPOINT",
                       .help = "the checkpoint's own folder; must not exist yet",
                       .required = true},
                      {.name = "allow-unknown",
                       .help = "leave out tensors that the model lacks (they are listed)"}},
          .example = "marrow import Qwen3-30B-A3B --output checkpoints/qwen3",
          .notes = "Train from it with model.init_from = \"CHECKPOINT\".",
          .run = run_import};
}

}  // namespace marrow
