// The device of a run: choosing it, its memory, and values and times that come back from it without a wait.
#pragma once
#include <c10/core/Event.h>

#include <chrono>

#include "ops/pch.h"

namespace marrow {

bool gpu_available();  // built with CUDA kernels, and a GPU is there
// Makes GPU `index` of this host the current one. Error: kUsage where there is none, or one without kernels here.
at::Device use_gpu(int64_t index);
// What this build can do on GPUs of a compute capability: on Hopper (9.0) all; on Blackwell (10.0, where it never ran)
// the experts' products are libtorch's, and there is no fp8; on others nothing.
enum class GpuSupport { kTuned, kPlain, kNone };
constexpr GpuSupport gpu_support(int64_t major, int64_t minor) {
  if (minor != 0) return GpuSupport::kNone;
  return major == 9 ? GpuSupport::kTuned : major == 10 ? GpuSupport::kPlain : GpuSupport::kNone;
}
GpuSupport gpu_support(at::Device device);

// Error (kUsage) for a GPU without the block-scaled products of train.dtype = "fp8"; the CPU emulates them.
void check_fp8_device(at::Device device);

void* cublas_lt_handle();  // libtorch's, of the current GPU

// Highest memory so far: what the allocator holds of a GPU, resident memory on the CPU.
int64_t peak_memory_bytes(at::Device device);
int64_t available_memory_bytes(at::Device device);  // that a program could still take

// Threads of operators on the CPU: `wanted`, or with 0 the cores divided by `ranks`.
void set_cpu_threads(int64_t wanted, int64_t ranks);

// [n] on the device. The copy is queued, and waits for nothing.
template <typename T>
at::Tensor to_device(const std::vector<T>& values, at::Device device) {
  const auto type = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value).pinned_memory(device.is_cuda());
  const at::Tensor host = at::empty({std::ssize(values)}, type);
  std::ranges::copy(values, host.data_ptr<T>());
  return device.is_cuda() ? host.to(device, /*non_blocking=*/true) : host;
}

// A moment in the device's queue: when all work before it is done. On the CPU that is at once.
class DeviceMark {
 public:
  explicit DeviceMark(at::Device device);
  void wait() const;
  double seconds_since(const DeviceMark& earlier) const;  // both past; error otherwise

 private:
  std::chrono::steady_clock::time_point time_;  // on the CPU
  std::optional<c10::Event> event_;             // on a GPU
};

// A copy of a small device tensor on its way to the host. `values` waits for it.
class DeferredValues {
 public:
  explicit DeferredValues(const at::Tensor& source);  // [n], copied as fp64
  std::vector<double> values();

 private:
  at::Tensor host_;  // [n] fp64, pinned where the source is on a GPU
  std::optional<c10::Event> event_;
};

}  // namespace marrow
