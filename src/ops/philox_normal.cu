#include "ops/kernel_tools.cuh"
#include "ops/philox_normal_math.h"

namespace marrow {
namespace {

constexpr int kThreads = 256;

// A thread fills what [first, first + n) holds of one Philox block of 4 elements.
template <typename T>
__global__ void fill(T* out, int64_t n, philox::Key key, int64_t first, float std) {
  const int64_t block = first / 4 + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (block * 4 >= first + n) return;
  float normals[4];
  philox::normals_of_block(key, static_cast<uint64_t>(block), normals);
  for (int i = 0; i < 4; ++i) {
    const int64_t element = block * 4 + i;
    if (element < first || element >= first + n) continue;
    out[element - first] = static_cast<T>(philox::mul(normals[i], std));
  }
}

}  // namespace

void philox_normal_cuda(View out, const philox::Key& key, int64_t first_element, float std) {
  const int64_t n = out.elements;
  const int64_t philox_blocks = (first_element + n + 3) / 4 - first_element / 4;
  launch_typed(out.bf16, [&]<typename T>() {
    fill<T><<<blocks_for(philox_blocks, kThreads), kThreads, 0, current_stream()>>>(out, n, key, first_element, std);
  });
}

}  // namespace marrow
