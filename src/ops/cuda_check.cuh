// Checks of CUDA calls and launches, for .cu files. No torch header may come here: nvcc needs
// 2 s for a plain file and over a minute for one with torch.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "base/error.h"

// Throws unless `call` returned cudaSuccess. After a launch: MARROW_CUDA_CHECK(cudaGetLastError()).
#define MARROW_CUDA_CHECK(call)                                                                  \
  do {                                                                                           \
    const cudaError_t marrow_status = (call);                                                    \
    MARROW_CHECK(marrow_status == cudaSuccess, ::marrow::ExitCode::kDeviceFault,                 \
                 ::marrow::Fix("run again with CUDA_LAUNCH_BLOCKING=1, or under "                \
                               "compute-sanitizer, to find the kernel at fault"),                \
                 "{} failed: {}", #call, cudaGetErrorString(marrow_status));                     \
  } while (false)
