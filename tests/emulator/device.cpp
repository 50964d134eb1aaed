// A device cuda:0 in host memory: what ATen asks of one, and its operations by way of the CPU.
#include "ops/pch.h"
// After the precompiled header:
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <bit>
#include <cstdlib>
#include <mutex>

#include "emulator/emulator.h"
#include "ops/fp8_quantize.h"

namespace at {  // where the registry looks for a class of this name
namespace {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace
}  // namespace at

namespace marrow {
namespace {

using at::Tensor;
const at::Device kDevice(at::kCUDA, 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return at::kCUDA; }
  at::Device exchangeDevice(at::Device) const override { return kDevice; }
  at::Device getDevice() const override { return kDevice; }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  at::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(at::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(at::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(kDevice); }
};

struct DeviceMemory final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* memory = emulator::allocate(bytes);
    return {memory, memory, &emulator::release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &emulator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// The CPU's own tensors, of which nothing is checked, keep what was freed: the sanitizer's malloc maps large pieces
// anew each time.
struct HostMemory final : c10::Allocator {
  static constexpr size_t kHead = 64;  // before the data: its size
  struct Freed {
    std::mutex mutex;
    std::map<size_t, std::vector<void*>> pieces;
  };
  static Freed& freed() {
    static auto& all = *new Freed;  // never destroyed: tensors may outlive it
    return all;
  }
  at::DataPtr allocate(size_t bytes) override {
    const size_t size = std::bit_ceil(bytes + kHead);
    void* data = nullptr;
    {
      const std::lock_guard lock(freed().mutex);
      std::vector<void*>& pieces = freed().pieces[size];
      if (!pieces.empty()) data = pieces.back(), pieces.pop_back();
    }
    if (data == nullptr) {
      auto* memory = static_cast<char*>(std::aligned_alloc(kHead, size));
      *reinterpret_cast<size_t*>(memory) = size;
      data = memory + kHead;
    }
    return {data, data, &release, at::kCPU};
  }
  static void release(void* data) {
    const std::lock_guard lock(freed().mutex);
    freed().pieces[*reinterpret_cast<size_t*>(static_cast<char*>(data) - kHead)].push_back(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
HostMemory host_memory;
[[maybe_unused]] const bool host_memory_is_set = (c10::SetAllocator(at::kCPU, &host_memory, 1), true);
DeviceMemory device_memory;
REGISTER_ALLOCATOR(at::DeviceType::CUDA, &device_memory)

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& x) {
  return x.is_cuda() ? at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU)) : x;
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::kFloat));
}

Tensor& copy(Tensor& to, const Tensor& from, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor& set(Tensor& x, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return x;
}

const Tensor& resize(const Tensor& x, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * x.element_size();
  c10::Storage storage = x.storage();
  if (storage.nbytes() < bytes) {
    MARROW_CHECK(storage.nbytes() == 0, ExitCode::kUsage, Fix("pass an output of the right size"),
                 "an output {} of size {}", c10::str(x.sizes()), c10::str(sizes));
    storage.set_data_ptr_noswap(device_memory.allocate(bytes));
    storage.set_nbytes(bytes);
  }
  x.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return x;
}

Tensor copy_results(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}

// What the CPU does not have: products that add in fp32, and of blocks with scales.
Tensor mm_of_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  return at::mm(on_host(a).to(dtype), on_host(b).to(dtype)).to(kDevice);
}

Tensor& addmm_of_dtype(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                       const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  on_host(out).copy_(at::addmm(on_host(self), on_host(a).to(dtype), on_host(b).to(dtype), beta, alpha));
  return out;
}

Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                 const std::optional<Tensor>&, const std::optional<Tensor>&, std::optional<at::ScalarType> dtype,
                 bool) {
  const Tensor left = dequantize({on_host(a), on_host(scale_a)});
  const Tensor right = dequantize({on_host(b).t(), on_host(scale_b).t()});
  return at::mm(left, right.t()).to(kDevice, dtype.value_or(at::kBFloat16));
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<Tensor (*)(const Tensor&, at::IntArrayRef)>(&at::native::view));
  library.impl("unfold", &at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", &set);
  library.impl("resize_", &resize);
  library.impl("copy_", &copy);
  library.impl("_copy_from_and_resize", &copy_results);
  library.impl("mm.dtype", &mm_of_dtype);
  library.impl("addmm.dtype_out", &addmm_of_dtype);
  library.impl("_scaled_mm", &scaled_mm);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

}  // namespace
}  // namespace marrow
