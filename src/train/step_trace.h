// A Chrome/Perfetto trace of one step: operators on the host, kernels on the device.
#pragma once
#include "ops/pch.h"

namespace marrow {

// Records from construction; `save` ends the recording and writes the file (JSON), which
// ui.perfetto.dev and chrome://tracing open. One at a time.
class StepTrace {
 public:
  // `memory`: allocations and frees too.
  StepTrace(at::Device device, bool memory);
  void save(const std::string& path);
};

}  // namespace marrow
