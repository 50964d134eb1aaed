#include "app/subcommands.h"
#include "train/convert.h"

namespace marrow {
namespace {

int run_export(const CommandLine& args) {
  Logger log;
  const Checkpoint checkpoint = open_checkpoint(args.positional(), log);
  const std::string output = args.text("output");
  const TensorDtype dtype = args.text("dtype") == "bf16" ? TensorDtype::kBF16 : TensorDtype::kF32;
  const int64_t bytes = export_checkpoint(checkpoint, output, dtype);
  args.print(fmt::format("exported {} (step {}, {}, {} bytes) to {}", checkpoint.folder(),
                         checkpoint.state().step, args.text("dtype"), bytes, output),
             JsonWriter()
                 .field("output", output)
                 .field("checkpoint", checkpoint.folder())
                 .field("step", checkpoint.state().step)
                 .field("dtype", args.text("dtype"))
                 .field("bytes", bytes));
  return 0;
}

}  // namespace

Subcommand export_command() {
  return {
      .name = "export",
      .summary = "a checkpoint as a Hugging Face folder",
      .positionals = {"CHECKPOINT"},
      .options = {{.name = "output",
                   .takes = Takes::kOne,
                   .value = "HF_DIR",
                   .help = "folder to write; must not exist yet",
                   .required = true},
                  {.name = "dtype",
                   .takes = Takes::kOne,
                   .value = "DTYPE",
                   .fallback = "fp32",
                   .help = "of the weights",
                   .choices = {"fp32", "bf16"}}},
      .example = "marrow export runs/tiny/checkpoints/step-00000200 --output exported",
      .notes = "CHECKPOINT may also be a run's folder: its newest complete checkpoint is taken.",
      .run = run_export};
}

}  // namespace marrow
