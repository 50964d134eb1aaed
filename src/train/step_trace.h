// A Chrome/Perfetto trace of one step: operators on the host, kernels on the device.
#pragma once
#include "ops/pch.h"

namespace marrow {

void start_trace(at::Device device, bool memory);  // `memory`: allocations and frees too. One at a time
void save_trace(const std::string& path);          // ends it; JSON for ui.perfetto.dev and chrome://tracing

}  // namespace marrow
