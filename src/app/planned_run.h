// The config of a run that is planned, not started: by `marrow plan` and `marrow estimate`.
#pragma once
#include "app/command_line.h"
#include "train/pretrain_config.h"

namespace marrow {

// Reads RUN.toml with --set; open sizes of [mesh] are the least that fit, or what --processes leaves. For GPUs
// unless the run says otherwise; neither they nor the corpora need be here.
inline PretrainConfig read_planned_config(const CommandLine& args) {
  PretrainConfig config =
      read_pretrain_config(args.positional(), args.list("set"), /*have_gpu=*/true, /*needs_inputs=*/false);
  const auto& mesh = config.mesh;
  int64_t processes = 1;
  for (const int64_t size : {mesh.pp, mesh.dp, mesh.cp, mesh.ep}) processes *= std::max<int64_t>(1, size);
  resolve_mesh(config, args.has("processes") ? args.integer("processes", 1) : processes);
  return config;
}

}  // namespace marrow
