// Copies happen as late as __pipeline_wait_prior allows, in orders of odd number at once: either may be what a GPU
// does.
#pragma once
#include <cuda_runtime.h>

namespace emulator {
struct alignas(16) Sixteen {
  unsigned char bytes[16];
};
inline void copy(const AsyncCopy& copy) {
  *static_cast<Sixteen*>(copy.to) = copy.zero ? Sixteen{} : *static_cast<const Sixteen*>(copy.from);
}
}  // namespace emulator

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
  emulator::check(bytes == 16 && (zeros == 0 || zeros == 16), "an asynchronous copy of other than 16 bytes");
  emulator::check(reinterpret_cast<uintptr_t>(from) % 16 == 0, "an asynchronous copy from an unaligned place");
  const emulator::AsyncCopy copy{to, from, zeros == 16};
  emulator::order % 2 == 1 ? emulator::copy(copy) : emulator::current->open.push_back(copy);
}
inline void __pipeline_commit() {
  emulator::current->groups.push_back(std::move(emulator::current->open));
  emulator::current->open.clear();
}
inline void __pipeline_wait_prior(size_t groups) {
  auto& waiting = emulator::current->groups;
  for (; waiting.size() > groups; waiting.pop_front()) {
    for (const emulator::AsyncCopy& copy : waiting.front()) emulator::copy(copy);
  }
}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  emulator::check(byte >= emulator::shared_memory && byte < emulator::shared_memory + emulator::shared_bytes,
                  "an address outside of shared memory");
  return static_cast<size_t>(byte - emulator::shared_memory);
}
