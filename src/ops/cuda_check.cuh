// Checks of CUDA calls and launches, for .cu files. Neither torch's headers nor base/error.h come
// here: nvcc needs 2 s for a plain file and over a minute for one with torch.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace marrow {

// Throws an Error (kDeviceFault) that names the call and CUDA's text. In cuda_launch.cpp.
[[noreturn]] void throw_cuda_error(const char* call, const char* status, const char* file, int line);

}  // namespace marrow

// Throws unless `call` returned cudaSuccess. After a launch: MARROW_CUDA_CHECK(cudaGetLastError()).
#define MARROW_CUDA_CHECK(call)                                                             \
  do {                                                                                      \
    const cudaError_t marrow_status = (call);                                               \
    if (marrow_status != cudaSuccess) {                                                     \
      ::marrow::throw_cuda_error(#call, cudaGetErrorString(marrow_status), __FILE__, __LINE__); \
    }                                                                                       \
  } while (false)
