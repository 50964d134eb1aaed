// marrow report: a run folder's numbers as one HTML page.
#include "app/command_line.h"
#include "train/run_report.h"

namespace marrow {
namespace {

int run_report(const CommandLine& args) {
  const RunSummary summary = write_run_report(args.positional());
  args.print(fmt::format("{}: {} steps, loss {:.4f}, validation loss {:.4f}", summary.path, summary.steps, summary.loss,
                         summary.validation_loss),
             JsonWriter().field("report", summary.path, "steps", summary.steps, "loss", summary.loss, "validation_loss",
                                summary.validation_loss));
  return 0;
}

}  // namespace

Subcommand report_command() {
  return {.name = "report",
          .summary = "a run as one self-contained HTML page",
          .positionals = {"RUN_DIR"},
          .example = "marrow report runs/quickstart",
          .run = run_report};
}

}  // namespace marrow
