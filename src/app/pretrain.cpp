// marrow pretrain: trains a model as RUN.toml says.
#include <filesystem>

#include "app/command_line.h"
#include "app/failure.h"
#include "app/launch.h"
#include "train/pretrain_loop.h"
#include "train/run_report.h"

namespace marrow {
namespace {

PretrainConfig read_config(const CommandLine& args) {
  return read_pretrain_config(args.positional(), args.list("set"), gpu_available());
}

int launch(const CommandLine& args, StopSignal& stop) {
  const int64_t processes = args.integer("processes", 1, 4096);
  const auto kind = std::filesystem::status(args.positional()).type();
  MARROW_CHECK(kind != std::filesystem::file_type::fifo && kind != std::filesystem::file_type::character,
               ExitCode::kUsage, Fix("write the config to a file: every rank reads it"),
               "{} cannot be read more than once", args.positional());
  PretrainConfig config = read_config(args);
  const auto model = open_model(Json::read_file(config.model.config, ExitCode::kUsage));
  check_model_fits(config, model->shape(), processes);
  return launch_ranks(processes, config.log.dir, config.log.watchdog_seconds, stop,
                      [&](int64_t rank) { return Mesh(config.mesh, rank).text(); });
}

int run_pretrain(const CommandLine& args) {
  if (args.has("help-config")) {
    std::fputs(config_help().c_str(), stdout);
    return 0;
  }
  StopSignal stop;  // before libtorch starts threads: they inherit the blocked signals
  if (args.has("processes") && !launched()) return launch(args, stop);
  prepare_gpu_environment();
  PretrainConfig config;
  std::exception_ptr failure;  // told once the ranks are together, by one of them
  try {
    config = read_config(args);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  const std::unique_ptr<Bootstrap> bootstrap = make_bootstrap(config.log.watchdog_seconds);
  MARROW_CHECK(!args.has("processes") || args.integer("processes", 1) == bootstrap->size(), ExitCode::kUsage,
               Fix("leave out --processes where a launcher starts the ranks"), "--processes {} in a run of {}",
               args.text("processes"), bootstrap->size());
  run_together(*bootstrap, [&] {
    if (failure) std::rethrow_exception(failure);
  });
  RunRecords records(args.has("json"));
  try {
    PretrainLoop loop(config, *bootstrap, records, args.logger());
    const int64_t step = loop.run(stop);
    if (bootstrap->rank() != 0) return 0;
    write_run_report(config.log.dir);
    args.print(fmt::format("{} at step {}; {}", loop.stopped() ? "stopped" : "done", step, config.log.dir),
               JsonWriter().field("step", step, "dir", config.log.dir, "stopped", loop.stopped()));
  } catch (const PeerFailure&) {
    throw;
  } catch (...) {
    records.fail(current_error());  // does not return where there are other ranks to end
  }
  return 0;
}

}  // namespace

Subcommand pretrain_command() {
  return {.name = "pretrain",
          .summary = "train a model as a run config says; resumes by itself",
          .positionals = {"RUN.toml"},
          .options = {{"[--set KEY=VALUE]...", "overrides a key, for example train.steps=100"},
                      {"[--processes N]", "starts N ranks on this machine, by mpirun"},
                      {"[--help-config]", "every key of RUN.toml with its default and range"}},
          .example = "marrow pretrain configs/runs/quickstart.toml --set train.steps=100",
          .run = run_pretrain};
}

}  // namespace marrow
