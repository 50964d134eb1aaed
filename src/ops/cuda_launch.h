// Where operators cross from C++ to their CUDA kernels (NAME.cu, declared in NAME_cuda.h).
#pragma once
#include "ops/pch.h"

namespace marrow {

// The stream that ATen uses now, as a cudaStream_t. Error in a build without CUDA.
void* current_cuda_stream();

}  // namespace marrow

// Runs `call` where CUDA was built in; elsewhere a CUDA tensor cannot exist, and reaching this is
// an error. Keeps NAME.cpp free of #ifdef.
#ifdef MARROW_CUDA
#define MARROW_CUDA_CALL(call) call
#else
#define MARROW_CUDA_CALL(call)                                                                 \
  do {                                                                                         \
    (void)sizeof(((call), 0)); /* its operands count as used */                                \
    MARROW_THROW(::marrow::ExitCode::kDeviceFault, ::marrow::Fix("build with the gpu preset"), \
                 "a CUDA tensor reached a build without CUDA kernels");                        \
  } while (false)
#endif
