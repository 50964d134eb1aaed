#include "ops/op_tools.h"

#ifdef MARROW_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace marrow {

void check_tensor(std::string_view name, const Tensor& tensor, at::ScalarType dtype,
                  at::IntArrayRef sizes) {
  bool fits = tensor.defined() && tensor.scalar_type() == dtype && tensor.is_contiguous() &&
              tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = sizes[i] == -1 || sizes[i] == tensor.size(static_cast<int64_t>(i));
  }
  if (fits) return;
  MARROW_CHECK(tensor.defined(), ExitCode::kUsage, Fix("pass this tensor"), "{} is undefined",
               name);
  MARROW_THROW(
      ExitCode::kUsage,
      Fix("compare config.json with the weights' shapes, and train.dtype with the model's"),
      "{} is {} {}{}; it must be contiguous {} {} (-1: any)", name,
      c10::toString(tensor.scalar_type()), c10::str(tensor.sizes()),
      tensor.is_contiguous() ? "" : " with gaps", c10::toString(dtype), c10::str(sizes));
}

void check_working_dtype(std::string_view name, const Tensor& tensor) {
  MARROW_CHECK(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16,
               ExitCode::kUsage, Fix("set train.dtype to fp32 or bf16"),
               "{} is {}; operators compute in float or bfloat16", name,
               c10::toString(tensor.scalar_type()));
}

#ifdef MARROW_CUDA
cudaStream_t current_stream();  // these two are declared for .cu files in kernel_tools.cuh
cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

[[noreturn]] void throw_cuda_error(const char* call, const char* status, const char* file,
                                   int line);
void throw_cuda_error(const char* call, const char* status, const char* file, int line) {
  throw Error(ExitCode::kDeviceFault, fmt::format("{} failed: {}", call, status),
              Fix("run again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the "
                  "kernel at fault"),
              file, line);
}
#endif

}  // namespace marrow
