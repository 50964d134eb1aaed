// A run that is planned, not started: by `marrow plan` and `marrow estimate`.
#pragma once
#include "app/command_line.h"
#include "train/pretrain_config.h"

namespace marrow {

struct PlannedRun {
  PretrainConfig config;
  std::unique_ptr<MoeModel> model;
};

// Reads RUN.toml with --set; open sizes of [mesh] are the least that fit, or what --processes leaves. For GPUs
// unless the run says otherwise; neither they nor the corpora need be here.
inline PlannedRun open_planned_run(const CommandLine& args) {
  PlannedRun run;
  run.config = read_pretrain_config(args.positional(), args.list("set"), /*have_gpu=*/true, /*needs_inputs=*/false);
  run.model = open_model(Json::read_file(run.config.model.config, ExitCode::kUsage));
  int64_t processes = 1;
  const MeshShape& mesh = run.config.mesh;
  for (const int64_t size : {mesh.pp, mesh.dp, mesh.cp, mesh.ep}) processes *= std::max<int64_t>(1, size);
  if (args.has("processes")) processes = args.integer("processes", 1);
  MARROW_CHECK(processes <= 1 << 16, ExitCode::kUsage, Fix("lower mesh.pp, dp, cp or ep, or --processes"),
               "a plan of {} processes: the most are {}", processes, 1 << 16);
  check_model_fits(run.config, run.model->shape(), processes);
  return run;
}

}  // namespace marrow
