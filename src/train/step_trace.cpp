#include "train/step_trace.h"

#include <torch/csrc/autograd/profiler_kineto.h>

namespace marrow {

void start_trace(at::Device device, bool memory) {
  using torch::profiler::impl::ActivityType;
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (device.is_cuda()) activities.insert(ActivityType::CUDA);
  // A profiler for GPUs that finds none calls that an error, on standard error; what it cannot do, it throws.
  if (device.is_cpu()) setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO,
                                                     /*report_input_shapes=*/false, memory);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
}

void save_trace(const std::string& path) { torch::autograd::profiler::disableProfiler()->save(path); }

}  // namespace marrow
