// Ctrl-C, SIGTERM and SIGHUP as a question that the training loop asks between steps.
#pragma once
#include <csignal>

namespace marrow {

// From construction on, SIGINT, SIGTERM and SIGHUP (unless it is ignored, as nohup has it) no longer end the process:
// they wait to be asked for. Construct it before any thread is started (threads inherit the blocked signals).
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  bool requested();

 private:
  sigset_t signals_;
  int descriptor_ = -1;
  bool requested_ = false;
};

}  // namespace marrow
