// A small run of several ranks that fails in a chosen way, for tests/oracle/launch_oracle.py.
#pragma once
#include <string>
#include <vector>

namespace marrow {

// NAME FOLDER RANK SECONDS [--json] [--processes N]: at its 20th step rank RANK does what NAME says, under a
// watchdog of SECONDS. Names: none, throw, kill, segfault, stop (SIGSTOP), hang, refuse (an error before
// the run folder exists), until-signal (goes on until SIGTERM, then ends well).
int run_scenario(const std::vector<std::string>& words);

}  // namespace marrow
