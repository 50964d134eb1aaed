// Matrix products of a whole block, from shared or global memory, summed in fp32 registers: on tensor cores in bf16,
// and exactly in fp32 (slow: for tests). Besides, tiles of rows in shared memory.
#pragma once
#include <cuda_pipeline_primitives.h>
#include <mma.h>

#include <type_traits>

#include "ops/kernel_tools.cuh"

namespace marrow {

constexpr int kProductThreads = 256, kProductWarps = kProductThreads / 32;

template <typename T>
constexpr int kPackOf = 16 / sizeof(T);  // elements of a 16-byte access

// Distance of rows of a tile in shared memory: a pack more than they need, so that they start in different banks.
template <typename T>
__host__ __device__ constexpr int padded(int width) {
  return width + kPackOf<T>;
}

// Sums of M × N. add: += op(a) [M, K] · op(b) [K, N], op transposing what is stored; a and b aligned to 32 bytes.
template <typename T, int M, int N>
struct BlockProduct;

template <int M, int N>
struct BlockProduct<bf16, M, N> {
  static constexpr int kTiles = M * N / 256, kEach = kTiles > kProductWarps ? kTiles / kProductWarps : 1;
  static constexpr int kAcross = kEach >= 4 ? 2 : 1, kDown = kEach / kAcross, kColumns = N / 16 / kAcross;
  static_assert(M % (16 * kDown) == 0 && N % (16 * kAcross) == 0 && kTiles / kEach <= kProductWarps);
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> sums[kDown][kAcross];

  __device__ BlockProduct() {
    for (auto& row : sums) {
      for (auto& tile : row) nvcuda::wmma::fill_fragment(tile, 0.0f);
    }
  }
  __device__ static bool works() { return threadIdx.x / 32 < kTiles / kEach; }
  __device__ static int row(int i) { return (threadIdx.x / 32 / kColumns * kDown + i) * 16; }
  __device__ static int column(int j) { return (threadIdx.x / 32 % kColumns * kAcross + j) * 16; }

  template <bool kTransposeA, bool kTransposeB, int K>
  __device__ void add(const bf16* a, int lda, const bf16* b, int ldb) {
    namespace wmma = nvcuda::wmma;
    using LayoutA = std::conditional_t<kTransposeA, wmma::col_major, wmma::row_major>;
    using LayoutB = std::conditional_t<kTransposeB, wmma::col_major, wmma::row_major>;
    if (!works()) return;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
      wmma::fragment<wmma::matrix_b, 16, 16, 16, bf16, LayoutB> right[kAcross];
      for (int j = 0; j < kAcross; ++j) {
        wmma::load_matrix_sync(right[j], b + (kTransposeB ? column(j) * ldb + k : k * ldb + column(j)), ldb);
      }
      for (int i = 0; i < kDown; ++i) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, bf16, LayoutA> left;
        wmma::load_matrix_sync(left, a + (kTransposeA ? k * lda + row(i) : row(i) * lda + k), lda);
        for (int j = 0; j < kAcross; ++j) wmma::mma_sync(sums[i][j], left, right[j], sums[i][j]);
      }
    }
  }
  __device__ void scale(float factor) {
    for (auto& row : sums) {
      for (auto& tile : row) {
        for (int x = 0; x < tile.num_elements; ++x) tile.x[x] *= factor;
      }
    }
  }
  __device__ void load(const float* from, int ld) {
    if (!works()) return;
    for (int i = 0; i < kDown; ++i) {
      for (int j = 0; j < kAcross; ++j) {
        nvcuda::wmma::load_matrix_sync(sums[i][j], from + row(i) * ld + column(j), ld, nvcuda::wmma::mem_row_major);
      }
    }
  }
  __device__ void store(float* to, int ld) const {
    if (!works()) return;
    for (int i = 0; i < kDown; ++i) {
      for (int j = 0; j < kAcross; ++j) {
        nvcuda::wmma::store_matrix_sync(to + row(i) * ld + column(j), sums[i][j], ld, nvcuda::wmma::mem_row_major);
      }
    }
  }
};

template <int M, int N>
struct BlockProduct<float, M, N> {
  static constexpr int kEach = M * N / kProductThreads;
  float sums[kEach] = {};

  __device__ static int row(int i) { return (i * kProductThreads + threadIdx.x) / N; }
  __device__ static int column() { return threadIdx.x % N; }

  template <bool kTransposeA, bool kTransposeB, int K>
  __device__ void add(const float* a, int lda, const float* b, int ldb) {
    for (int k = 0; k < K; ++k) {
      const float right = kTransposeB ? b[column() * ldb + k] : b[k * ldb + column()];
      for (int i = 0; i < kEach; ++i) sums[i] += (kTransposeA ? a[k * lda + row(i)] : a[row(i) * lda + k]) * right;
    }
  }
  __device__ void scale(float factor) {
    for (float& sum : sums) sum *= factor;
  }
  __device__ void load(const float* from, int ld) {
    for (int i = 0; i < kEach; ++i) sums[i] = from[row(i) * ld + column()];
  }
  __device__ void store(float* to, int ld) const {
    for (int i = 0; i < kEach; ++i) to[row(i) * ld + column()] = sums[i];
  }
};

// What launch_with_memory gives a block.
template <typename Shared>
__device__ Shared& shared_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return *reinterpret_cast<Shared*>(memory);
}

// Starts copying a tile [R, W] from rows `stride` apart, of which `rows` and their first `width` elements exist (a
// multiple of a pack); the rest is zero. It is there after __pipeline_commit, __pipeline_wait_prior and a barrier.
template <int R, int W, typename T>
__device__ void copy_tile(const T* from, int64_t stride, int64_t rows, int64_t width, T* to) {
  constexpr int kPacks = W / kPackOf<T>;
  for (int e = threadIdx.x; e < R * kPacks; e += kProductThreads) {
    const int r = e / kPacks, c = e % kPacks * kPackOf<T>;
    const bool exists = r < rows && c < width;
    __pipeline_memcpy_async(to + r * padded<T>(W) + c, exists ? from + r * stride + c : from, 16, exists ? 0 : 16);
  }
}

__device__ inline void wait_for_tiles() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
}

// Calls body(i, r, c) for four elements from column c of each row r of [R, N]: this thread's i-th. The N / 4 threads of
// a row are neighbours in a warp.
template <int R, int N, typename Body>
__device__ __forceinline__ void for_packs(const Body& body) {
  constexpr int kPacks = N / 4, kEach = (R * kPacks + kProductThreads - 1) / kProductThreads;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = i * kProductThreads + threadIdx.x;
    if (e < R * kPacks) body(i, e / kPacks, e % kPacks * 4);
  }
}

__device__ __forceinline__ float dot4(const float (&a)[4], const float (&b)[4]) {
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
}

// Launches `kernel` with that much shared memory; no blocks: nothing.
template <typename... Parameters, typename... Arguments>
void launch_with_memory(void (*kernel)(Parameters...), int64_t blocks, size_t bytes, const Arguments&... arguments) {
  if (blocks == 0) return;
  MARROW_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  kernel<<<static_cast<unsigned>(blocks), kProductThreads, bytes, current_stream()>>>(arguments...);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
