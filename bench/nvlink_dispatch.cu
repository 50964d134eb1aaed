// The kernels of nvlink_dispatch.h, and how a rank gets at the windows of the others.
#include "nvlink_dispatch.h"

#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>

#include <cstdio>
#include <cstdlib>

#include "nvlink_kernels.cuh"
#include "nvlink_window.h"

// The experiment has no one to tell: it says what failed, and ends; mpirun ends the other ranks.
#define NVLINK_CHECK(call, ok, text)                                                           \
  do {                                                                                         \
    const auto nvlink_status = (call);                                                         \
    if (nvlink_status != ok) {                                                                 \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, text(nvlink_status)); \
      std::exit(4);                                                                            \
    }                                                                                          \
  } while (false)
#define NVLINK_CUDA(call) NVLINK_CHECK(call, cudaSuccess, cudaGetErrorString)
#define NVLINK_NCCL(call) NVLINK_CHECK(call, ncclSuccess, ncclGetErrorString)

namespace marrow::nvlink {
namespace {

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ Exchange x, uint32_t epoch, Plan plan) {
  extern __shared__ int shared[];
  make_plan(x, epoch, plan, shared);
}
__global__ void __launch_bounds__(kThreads)
    pull_kernel(const __grid_constant__ Exchange x, uint32_t epoch, char* rows, float* row_weights) {
  spread_rows<true>(x, epoch, nullptr, rows, row_weights);
}
__global__ void __launch_bounds__(kThreads) plan_and_pull_kernel(const __grid_constant__ Exchange x, uint32_t epoch,
                                                                 Plan plan, char* rows, float* row_weights) {
  extern __shared__ int shared[];
  make_plan(x, epoch, plan, shared);
  spread_rows<true>(x, epoch + 2, nullptr, rows, row_weights);
}
__global__ void __launch_bounds__(kThreads)
    push_kernel(const __grid_constant__ Exchange x, uint32_t epoch, const int32_t* choices, const char* tokens) {
  push_rows(x, epoch, choices, tokens);
}
__global__ void __launch_bounds__(kThreads)
    spread_kernel(const __grid_constant__ Exchange x, const char* tokens, char* rows, float* row_weights) {
  spread_rows<false>(x, 0, tokens, rows, row_weights);
}
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Exchange x, uint32_t epoch, const char* rows) {
  combine_rows(x, epoch, rows);
}
__global__ void meet_kernel(const __grid_constant__ Exchange x, uint32_t epoch) { meet<false>(x, epoch + 1); }

__global__ void delay_kernel(uint64_t wanted) {
  const uint64_t start = nanoseconds();
  while (nanoseconds() - start < wanted) __nanosleep(1000);
}

__global__ void window_pointers(ncclWindow_t window, int ranks, char** pointers) {
  for (int r = 0; r < ranks; ++r) pointers[r] = static_cast<char*>(ncclGetLsaPointer(window, 0, r));
}

size_t plan_bytes(const Exchange& x) { return plan_shared_ints(x.experts) * sizeof(int); }

}  // namespace

void launch_plan(const Exchange& x, uint32_t epoch, int blocks, const Plan& plan, cudaStream_t stream) {
  plan_kernel<<<blocks, kThreads, plan_bytes(x), stream>>>(x, epoch, plan);
  NVLINK_CUDA(cudaGetLastError());
}
void launch_pull(const Exchange& x, uint32_t epoch, int blocks, char* rows, float* row_weights, cudaStream_t stream) {
  pull_kernel<<<blocks, kThreads, 0, stream>>>(x, epoch, rows, row_weights);
  NVLINK_CUDA(cudaGetLastError());
}
void launch_plan_and_pull(const Exchange& x, uint32_t epoch, int blocks, const Plan& plan, char* rows,
                          float* row_weights, cudaStream_t stream) {
  plan_and_pull_kernel<<<blocks, kThreads, plan_bytes(x), stream>>>(x, epoch, plan, rows, row_weights);
  NVLINK_CUDA(cudaGetLastError());
}
void launch_push(const Exchange& x, uint32_t epoch, int blocks, const int32_t* choices, const char* tokens,
                 cudaStream_t stream) {
  push_kernel<<<blocks, kThreads, 0, stream>>>(x, epoch, choices, tokens);
  NVLINK_CUDA(cudaGetLastError());
}
void launch_spread(const Exchange& x, const char* tokens, char* rows, float* row_weights, cudaStream_t stream) {
  spread_kernel<<<132, kThreads, 0, stream>>>(x, tokens, rows, row_weights);
  NVLINK_CUDA(cudaGetLastError());
}
void launch_combine(const Exchange& x, uint32_t epoch, int blocks, const char* rows, cudaStream_t stream) {
  combine_kernel<<<blocks, kThreads, 0, stream>>>(x, epoch, rows);
  NVLINK_CUDA(cudaGetLastError());
}
void launch_meet(const Exchange& x, uint32_t epoch, int blocks, cudaStream_t stream) {
  meet_kernel<<<blocks, kThreads, 0, stream>>>(x, epoch);
  NVLINK_CUDA(cudaGetLastError());
}
void launch_delay(uint64_t wanted, cudaStream_t stream) {
  delay_kernel<<<1, 1, 0, stream>>>(wanted);
  NVLINK_CUDA(cudaGetLastError());
}

void NcclWindow::open(const std::string& identity, Exchange& x, int64_t bytes) {
  ncclUniqueId id;
  for (size_t i = 0; i < sizeof id.internal; ++i) id.internal[i] = identity.at(i);
  NVLINK_NCCL(ncclCommInitRank(&comm_, x.ranks, id, x.rank));
  NVLINK_NCCL(ncclMemAlloc(&memory_, static_cast<size_t>(bytes)));
  NVLINK_CUDA(cudaMemset(memory_, 0, static_cast<size_t>(bytes)));
  NVLINK_CUDA(cudaDeviceSynchronize());  // before any rank can write a flag
  NVLINK_NCCL(ncclCommWindowRegister(comm_, memory_, static_cast<size_t>(bytes), &window_, NCCL_WIN_DEFAULT));
  if (window_ == nullptr) {
    std::fprintf(stderr, "NCCL gave no window: no memory that the ranks share\n");
    std::exit(4);
  }
  char** pointers = nullptr;
  NVLINK_CUDA(cudaMalloc(&pointers, sizeof x.windows));
  window_pointers<<<1, 1>>>(window_, x.ranks, pointers);
  NVLINK_CUDA(cudaMemcpy(x.windows, pointers, x.ranks * sizeof *pointers, cudaMemcpyDeviceToHost));
  NVLINK_CUDA(cudaFree(pointers));
}

void NcclWindow::close() {
  NVLINK_NCCL(ncclCommWindowDeregister(comm_, window_));
  NVLINK_NCCL(ncclMemFree(memory_));
  NVLINK_NCCL(ncclCommDestroy(comm_));
}

std::string IpcWindow::allocate(int64_t bytes) {
  NVLINK_CUDA(cudaMalloc(&memory_, static_cast<size_t>(bytes)));
  NVLINK_CUDA(cudaMemset(memory_, 0, static_cast<size_t>(bytes)));
  NVLINK_CUDA(cudaDeviceSynchronize());  // before any rank can write a flag
  cudaIpcMemHandle_t handle;
  NVLINK_CUDA(cudaIpcGetMemHandle(&handle, memory_));
  return {reinterpret_cast<const char*>(&handle), sizeof handle};
}

void IpcWindow::open(const std::vector<std::string>& handles, Exchange& x) {
  for (int r = 0; r < x.ranks; ++r) {
    cudaIpcMemHandle_t handle;
    for (size_t i = 0; i < sizeof handle; ++i) reinterpret_cast<char*>(&handle)[i] = handles[r].at(i);
    void* pointer = memory_;
    if (r != x.rank) NVLINK_CUDA(cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess));
    x.windows[r] = static_cast<char*>(pointer);
  }
}

void IpcWindow::close(const Exchange& x) {
  for (int r = 0; r < x.ranks; ++r) {
    if (r != x.rank) NVLINK_CUDA(cudaIpcCloseMemHandle(x.windows[r]));
  }
}

}  // namespace marrow::nvlink
