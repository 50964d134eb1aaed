// Starts the ranks of a run on this machine, and answers for them.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "base/stop_signal.h"

namespace marrow {

// Were these ranks started by launch_ranks()?
bool launched();

// Runs this very command line `processes` times under mpirun, which is a child, until all have ended.
// SIGINT and SIGTERM go to the ranks, once each is ready for them. Standard output is theirs; what mpirun
// itself says is kept back, and shown where no rank told an error. Returns their exit code; the first
// error stands last on standard error. A rank that a signal ended is an Error (kDeviceFault) that names it by
// `rank_text(rank)`; so is one that is stopped where, after `start_seconds` (at least 20, for programs to load), not
// all have come through MPI_Init. No process is left when this returns, nor when this process is killed.
int launch_ranks(int64_t processes, const std::string& run_folder, double start_seconds, StopSignal& stop,
                 const std::function<std::string(int64_t)>& rank_text);

}  // namespace marrow
