#include "ops/embedding_cuda.h"
#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;

template <typename Word>
__global__ void copy_rows(const int32_t* ids, const Word* weight, Word* out, int64_t words) {
  const int64_t token = blockIdx.x;
  const Word* from = weight + static_cast<int64_t>(ids[token]) * words;
  Word* to = out + token * words;
  for (int64_t c = threadIdx.x; c < words; c += blockDim.x) to[c] = from[c];
}

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
    atomicAdd(reinterpret_cast<float4*>(to + c),
              make_float4(values[0], values[1], values[2], values[3]));
  }
}

// The block at the first row of a run of equal ids sums the whole run.
template <typename T>
__global__ void add_sorted_rows(const int32_t* sorted_ids, const int64_t* position, const T* d_out,
                                float* grad, int64_t tokens, int64_t hidden) {
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

void embedding_forward_cuda(const int32_t* ids, const void* weight, void* out, int64_t tokens,
                            int64_t row_bytes, void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  if (row_bytes % 16 == 0 && aligned_to(weight, 16) && aligned_to(out, 16)) {
    copy_rows<<<tokens, kThreads, 0, cuda_stream>>>(ids, static_cast<const uint4*>(weight),
                                                    static_cast<uint4*>(out), row_bytes / 16);
  } else {
    copy_rows<<<tokens, kThreads, 0, cuda_stream>>>(ids, static_cast<const uint16_t*>(weight),
                                                    static_cast<uint16_t*>(out), row_bytes / 2);
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void embedding_backward_cuda(const int32_t* ids, const void* d_out, bool is_bf16, float* grad,
                             int64_t tokens, int64_t hidden, void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  if (hidden % 4 == 0 && !(aligned_to(grad, 16) && aligned_to(d_out, 16))) {
    throw_cuda_error("embedding_backward_cuda", "gradients must be aligned to 16 bytes", __FILE__,
                     __LINE__);
  }
  if (is_bf16) {
    add_rows<<<tokens, kThreads, 0, cuda_stream>>>(ids, static_cast<const bf16*>(d_out), grad,
                                                   hidden);
  } else {
    add_rows<<<tokens, kThreads, 0, cuda_stream>>>(ids, static_cast<const float*>(d_out), grad,
                                                   hidden);
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void embedding_backward_sorted_cuda(const int32_t* sorted_ids, const int64_t* position,
                                    const void* d_out, bool is_bf16, float* grad, int64_t tokens,
                                    int64_t hidden, void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  if (is_bf16) {
    add_sorted_rows<<<tokens, kThreads, 0, cuda_stream>>>(
        sorted_ids, position, static_cast<const bf16*>(d_out), grad, tokens, hidden);
  } else {
    add_sorted_rows<<<tokens, kThreads, 0, cuda_stream>>>(
        sorted_ids, position, static_cast<const float*>(d_out), grad, tokens, hidden);
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
