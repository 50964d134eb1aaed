// LD_PRELOADed into marrow on a GPU: counts the CUDA calls in which the host waits for the device, or may, and writes
// "NAME COUNT" lines to $MARROW_SYNC_COUNTS at the end. count_syncs.sh runs it.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace {

enum Call { kStream, kDevice, kEvent, kCopy, kPageable, kMalloc, kFree, kCalls };
constexpr std::array<const char*, kCalls> kNames{"cudaStreamSynchronize",
                                                 "cudaDeviceSynchronize",
                                                 "cudaEventSynchronize",
                                                 "cudaMemcpy",
                                                 "cudaMemcpyAsync-pageable",
                                                 "cudaMalloc",
                                                 "cudaFree"};

struct Counts {
  std::array<std::atomic<long>, kCalls> of{};
  ~Counts() {
    const char* path = std::getenv("MARROW_SYNC_COUNTS");
    std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "w");
    if (file == nullptr) return;
    for (int call = 0; call < kCalls; ++call) std::fprintf(file, "%s %ld\n", kNames[call], of[call].load());
    std::fclose(file);
  }
} counts;

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define PASS_ON(call, name, parameters, ...)                       \
  extern "C" cudaError_t name parameters {                         \
    static auto* const real = next<cudaError_t parameters>(#name); \
    ++counts.of[call];                                             \
    return real(__VA_ARGS__);                                      \
  }

PASS_ON(kStream, cudaStreamSynchronize, (cudaStream_t stream), stream)
PASS_ON(kDevice, cudaDeviceSynchronize, (), )
PASS_ON(kEvent, cudaEventSynchronize, (cudaEvent_t event), event)
PASS_ON(kCopy, cudaMemcpy, (void* to, const void* from, size_t bytes, cudaMemcpyKind kind), to, from, bytes, kind)
PASS_ON(kMalloc, cudaMalloc, (void** pointer, size_t bytes), pointer, bytes)
PASS_ON(kFree, cudaFree, (void* pointer), pointer)

// To memory that is not pinned the copy waits for the stream.
extern "C" cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                       cudaStream_t stream) {
  static auto* const real =
      next<cudaError_t(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t)>("cudaMemcpyAsync");
  cudaPointerAttributes place{};
  if (kind == cudaMemcpyDeviceToHost && cudaPointerGetAttributes(&place, to) == cudaSuccess &&
      place.type == cudaMemoryTypeUnregistered) {
    ++counts.of[kPageable];
  }
  return real(to, from, bytes, kind, stream);
}
