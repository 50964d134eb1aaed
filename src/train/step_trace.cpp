#include "train/step_trace.h"

#include <torch/csrc/autograd/profiler_kineto.h>

namespace marrow {

void start_trace(at::Device device, bool memory) {
  using torch::profiler::impl::ActivityType;
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (device.is_cuda()) activities.insert(ActivityType::CUDA);
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO,
                                                     /*report_input_shapes=*/false, memory);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
}

void save_trace(const std::string& path) { torch::autograd::profiler::disableProfiler()->save(path); }

}  // namespace marrow
