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

}  // namespace marrow
