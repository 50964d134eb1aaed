// marrow pretrain: trains a model as RUN.toml says.
#include "app/subcommands.h"
#include "train/pretrain_loop.h"
#include "train/run_report.h"

namespace marrow {
namespace {

int run_pretrain(const CommandLine& args) {
  if (args.flag("help-config")) {
    std::fputs(config_help().c_str(), stdout);
    return 0;
  }
  StopSignal stop;  // before libtorch starts threads: they inherit the blocked signals
  const PretrainConfig config = read_pretrain_config(args.positional(), args.list("set"), gpu_available());
  Logger logger;
  logger.set_quiet(args.json());
  PretrainLoop loop(config, logger);
  const int64_t step = loop.run(stop);
  write_run_report(config.log.dir);
  args.print(fmt::format("{} at step {}; {}", stop.requested() ? "stopped" : "done", step, config.log.dir),
             JsonWriter().field("step", step).field("dir", config.log.dir).field("stopped", stop.requested()));
  return 0;
}

}  // namespace

Subcommand pretrain_command() {
  return {
      .name = "pretrain",
      .summary = "train a model as a run config says; resumes by itself",
      .positionals = {"RUN.toml"},
      .options = {{.name = "set",
                   .takes = Takes::kRepeated,
                   .value = "KEY=VALUE",
                   .help = "overrides a key, for example train.steps=100"},
                  {.name = "help-config", .help = "every key of RUN.toml with its default and range", .alone = true}},
      .example = "marrow pretrain configs/runs/quickstart.toml --set train.steps=100",
      .run = run_pretrain};
}

}  // namespace marrow
