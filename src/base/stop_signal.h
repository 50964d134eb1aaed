// Ctrl-C and SIGTERM as a question that the training loop asks between steps.
#pragma once

namespace marrow {

// From construction on, SIGINT and SIGTERM no longer end the process: they wait to be asked for.
// Construct it before any thread is started (threads inherit the blocked signals).
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  bool requested();

 private:
  int descriptor_ = -1;
  bool requested_ = false;
};

}  // namespace marrow
