#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void add_rows(const int32_t* ids, const T* d_out, float* grad, int64_t hidden) {
  const int64_t token = blockIdx.x;
  const T* from = d_out + token * hidden;
  float* to = grad + static_cast<int64_t>(ids[token]) * hidden;
  if (hidden % 4 != 0) {
    for (int64_t c = threadIdx.x; c < hidden; c += blockDim.x) {
      atomicAdd(to + c, static_cast<float>(from[c]));
    }
    return;
  }
  for (int64_t c = threadIdx.x * 4; c < hidden; c += blockDim.x * 4) {
    float values[4];
    load_pack<4>(from + c, values);
    atomicAdd(reinterpret_cast<float4*>(to + c), make_float4(values[0], values[1], values[2], values[3]));
  }
}

// The block at the first row of a run of equal ids sums the whole run.
template <typename T>
__global__ void add_sorted_rows(const int32_t* sorted_ids, const int64_t* position, const T* d_out, float* grad,
                                int64_t tokens, int64_t hidden) {
  const int64_t first = blockIdx.x;
  const int32_t id = sorted_ids[first];
  if (first > 0 && sorted_ids[first - 1] == id) return;
  float* to = grad + static_cast<int64_t>(id) * hidden;
  for (int64_t c = threadIdx.x; c < hidden; c += blockDim.x) {
    float sum = to[c];
    for (int64_t i = first; i < tokens && sorted_ids[i] == id; ++i) {
      sum += static_cast<float>(d_out[position[i] * hidden + c]);
    }
    to[c] = sum;
  }
}

}  // namespace

void embedding_backward_cuda(View ids, View d_out, View grad) {
  if (d_out.width % 4 == 0 && !(aligned_to(grad.data, 16) && aligned_to(d_out.data, 16))) {
    throw_cuda_error("embedding_backward_cuda", "gradients must be aligned to 16 bytes", __FILE__, __LINE__);
  }
  launch_typed(d_out.bf16, [&]<typename T>() {
    add_rows<T><<<d_out.rows, kThreads, 0, current_stream()>>>(ids, d_out, grad, d_out.width);
  });
}

void embedding_backward_sorted_cuda(View sorted_ids, View position, View d_out, View grad) {
  launch_typed(d_out.bf16, [&]<typename T>() {
    add_sorted_rows<T>
        <<<d_out.rows, kThreads, 0, current_stream()>>>(sorted_ids, position, d_out, grad, d_out.rows, d_out.width);
  });
}

}  // namespace marrow
