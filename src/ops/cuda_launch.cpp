#include "ops/cuda_launch.h"

#ifdef MARROW_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace marrow {

void* current_cuda_stream() {
#ifdef MARROW_CUDA
  return c10::cuda::getCurrentCUDAStream().stream();
#else
  MARROW_CUDA_CALL(0);
#endif
}

[[noreturn]] void throw_cuda_error(const char* call, const char* status, const char* file,
                                   int line);  // declared for .cu files in cuda_check.cuh

void throw_cuda_error(const char* call, const char* status, const char* file, int line) {
  throw Error(ExitCode::kDeviceFault, fmt::format("{} failed: {}", call, status),
              Fix("run again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the "
                  "kernel at fault"),
              file, line);
}

}  // namespace marrow
