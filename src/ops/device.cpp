#include "ops/device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <malloc.h>
#include <sys/resource.h>
#include <climits>

#include <fstream>
#include <thread>

#ifdef MARROW_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

// Libtorch's MKL asks this of itself, and on AMD leaves AVX-512 unused if it is not told yes: 97 in place of 106
// GFLOP/s on a core. What the CPU has is asked for all the same.
extern "C" int mkl_serv_intel_cpu_true() { return 1; }

namespace marrow {
namespace {

std::pair<int, int> compute_capability([[maybe_unused]] at::Device device) {
  int major = 0, minor = 0;
#ifdef MARROW_CUDA
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index()));
#endif
  return {major, minor};
}

}  // namespace

bool gpu_available() {
#ifdef MARROW_CUDA
  return at::hasCUDA();
#else
  return false;
#endif
}

void* cublas_lt_handle() {
#ifdef MARROW_CUDA
  return at::cuda::getCurrentCUDABlasLtHandle();
#else
  return nullptr;
#endif
}

int64_t peak_memory_bytes([[maybe_unused]] at::Device device) {
#ifdef MARROW_CUDA
  if (device.is_cuda()) {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(std::max<int>(device.index(), 0));
    return stats.reserved_bytes[0].peak;
  }
#endif
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

int64_t available_memory_bytes([[maybe_unused]] at::Device device) {
#ifdef MARROW_CUDA
  if (device.is_cuda()) {
    size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  }
#endif
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:")) return std::stoll(line.substr(13)) * 1024;
  }
  return INT64_MAX;  // a kernel that does not tell
}

at::Device use_gpu([[maybe_unused]] int64_t index) {
  int64_t count = 0;
#ifdef MARROW_CUDA
  count = c10::cuda::device_count();
#endif
  MARROW_CHECK(index < count, ExitCode::kUsage, Fix("start at most one process per GPU, or set train.device = \"cpu\""),
               "process {} of this host needs a GPU of its own, of which there are {}", index, count);
#ifdef MARROW_CUDA
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
#endif
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  const auto [major, minor] = compute_capability(device);
  MARROW_CHECK(gpu_support(major, minor) != GpuSupport::kNone, ExitCode::kUsage, Fix("set train.device = \"cpu\""),
               "the CUDA kernels are built for compute capability 9.0 and 10.0; {} has {}.{}", device.str(), major,
               minor);
  return device;
}

GpuSupport gpu_support(at::Device device) {
  const auto [major, minor] = compute_capability(device);
  return gpu_support(major, minor);
}

void check_fp8_device(at::Device device) {
  if (!device.is_cuda()) return;
  const auto [major, minor] = compute_capability(device);
  MARROW_CHECK(gpu_support(major, minor) == GpuSupport::kTuned, ExitCode::kUsage, Fix("set train.dtype = \"bf16\""),
               "train.dtype = \"fp8\" needs a GPU of compute capability 9.0 (Hopper); {} has {}.{}", device.str(),
               major, minor);
}

void set_cpu_threads(int64_t wanted, int64_t ranks) {
  const int64_t cores = std::max<int64_t>(std::thread::hardware_concurrency(), 1);
  at::set_num_threads(static_cast<int>(wanted > 0 ? wanted : std::max<int64_t>(1, cores / ranks)));
  // Activations of a step are freed and asked for again in the next: pages that went back to the
  // kernel meanwhile fault anew, which cost 5 % of a step. 32 MB is the most that glibc takes.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
}

DeviceMark::DeviceMark(at::Device device) {
  if (!device.is_cuda()) {
    time_ = std::chrono::steady_clock::now();
    return;
  }
  event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // the other kind has no times
  event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void DeviceMark::wait() const {
  if (event_) event_->synchronize();
}

double DeviceMark::seconds_since(const DeviceMark& earlier) const {
  if (!event_) return std::chrono::duration<double>(time_ - earlier.time_).count();
  return 1e-3 * earlier.event_->elapsedTime(*event_);
}

DeferredValues::DeferredValues(const at::Tensor& source) {
  const bool on_gpu = source.is_cuda();
  host_ = at::empty({source.numel()}, at::TensorOptions().dtype(at::kDouble).pinned_memory(on_gpu));
  host_.copy_(source.flatten().to(at::kDouble), /*non_blocking=*/on_gpu);
  if (!on_gpu) return;
  event_.emplace(at::kCUDA);  // without a time, which CUDA's manual calls the fastest kind
  event_->record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(source.device()));
}

std::vector<double> DeferredValues::values() {
  if (event_) event_->synchronize();
  const double* data = host_.data_ptr<double>();
  return {data, data + host_.numel()};
}

}  // namespace marrow
