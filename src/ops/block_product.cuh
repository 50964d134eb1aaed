// Matrix products of a whole block, from tiles in shared memory into fp32 registers: on tensor cores in bf16, exact in
// fp32 (slow: for tests).
#pragma once
#include <cuda_pipeline_primitives.h>

#include "ops/kernel_tools.cuh"

namespace marrow {

constexpr int kProductThreads = 256;

template <typename T>
constexpr int kPackOf = 16 / sizeof(T);  // elements of a 16-byte access

// Distance of rows of a tile in shared memory: in bf16 a pack more than they need, so that eight of them are in all
// banks.
template <typename T>
__host__ __device__ constexpr int padded(int width) {
  return width + (sizeof(T) == 2 ? 8 : 0);
}

// Four blocks of 8 × 8; each lane gives a row of one. Element (lane / 4, lane % 4 · 2) and the one behind it of each,
// of the transposed ones where kTranspose.
template <bool kTranspose>
__device__ __forceinline__ void load_blocks(const bf16* row, unsigned (&to)[4]) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  }
}

// sums [16, 8] += a [16, 16] · b [16, 8]
__device__ __forceinline__ void multiply_blocks(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// M × N sums. A warp has 16 rows, whole or a part of the columns; a thread two of them, row() and row() + 8, and of
// each the two columns from column(t) of every tile of 8.
template <typename T, int M, int N>
struct BlockProduct {
  static constexpr int kSplit = 128 / M, kTiles = N / kSplit / 8;  // warps that share rows; tiles of a warp
  float sums[kTiles][4] = {};                                      // of row(), then of row() + 8

  __device__ static int first_row() { return threadIdx.x / 32 / kSplit * 16; }
  __device__ static int first_column() { return threadIdx.x / 32 % kSplit * kTiles * 8; }
  __device__ static int row() { return first_row() + threadIdx.x % 32 / 4; }
  __device__ static int column(int t) { return first_column() + t * 8 + threadIdx.x % 4 * 2; }

  // += op(a) [M, K] · op(b) [K, N], op transposing what is stored.
  template <bool kTransposeA, bool kTransposeB, int K>
  __device__ void add(const T* a, int lda, const T* b, int ldb) {
    if constexpr (sizeof(T) == 2) {
      static_assert(kTiles % 2 == 0);
      const int row = threadIdx.x % 8, near = threadIdx.x / 8 % 2 * 8, far = threadIdx.x / 16 % 2 * 8;
#pragma unroll
      for (int k = 0; k < K; k += 16) {
        unsigned left[4], right[4];
        load_blocks<kTransposeA>(kTransposeA ? a + (k + far + row) * lda + first_row() + near
                                             : a + (first_row() + near + row) * lda + k + far,
                                 left);
        for (int t = 0; t < kTiles; t += 2) {
          const int column = first_column() + t * 8 + far;
          load_blocks<!kTransposeB>(
              kTransposeB ? b + (column + row) * ldb + k + near : b + (k + near + row) * ldb + column, right);
          multiply_blocks(sums[t], left, right[0], right[1]);
          multiply_blocks(sums[t + 1], left, right[2], right[3]);
        }
      }
    } else {
      const int64_t of_row = kTransposeA ? 1 : lda, of_column = kTransposeB ? ldb : 1;
#pragma unroll 2
      for (int k = 0; k < K; ++k) {
        const T *left = a + (kTransposeA ? k * lda : k) + row() * of_row, *right = b + (kTransposeB ? k : k * ldb);
        for (int t = 0; t < kTiles; ++t) {
          for (int i = 0; i < 4; ++i) sums[t][i] += left[i / 2 * 8 * of_row] * right[(column(t) + i % 2) * of_column];
        }
      }
    }
  }
  // Calls body(r, c, half, pair): the sums of row r, the thread's first or second, in columns c and c + 1.
  template <typename Body>
  __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      body(row() + i % 2 * 8, column(i / 2), i % 2, *reinterpret_cast<float(*)[2]>(&sums[i / 2][i % 2 * 2]));
    }
  }
  // += factors of the two rows · other
  __device__ void add_rows(const BlockProduct& other, float first, float second) {
    for (int i = 0; i < 4 * kTiles; ++i) sums[i / 4][i % 4] += (i % 4 < 2 ? first : second) * other.sums[i / 4][i % 4];
  }
  __device__ void multiply_by(const BlockProduct& other) {
    for (int i = 0; i < 4 * kTiles; ++i) sums[i / 4][i % 4] *= other.sums[i / 4][i % 4];
  }
  __device__ void scale_rows(float first, float second) {
    for (int i = 0; i < 4 * kTiles; ++i) sums[i / 4][i % 4] *= i % 4 < 2 ? first : second;
  }
  // dots += this thread's part of its rows' products with those of a tile.
  __device__ void dot_rows(const T* tile, int ld, float (&dots)[2]) {
    each([&](int r, int c, int half, const float(&pair)[2]) {
      float with[2];
      load_pack<2>(tile + r * ld + c, with);
      dots[half] += pair[0] * with[0] + pair[1] * with[1];
    });
  }
  // Into rows `stride` apart, of which so many rows and columns exist.
  template <typename To>
  __device__ void store(To* to, int64_t stride, int64_t rows = M, int64_t width = N) {
    each([&](int r, int c, int, const float(&pair)[2]) {
      if (r < rows && c < width) store_pack<2>(to + r * stride + c, pair);
    });
  }
  // totals [kSplit][M]: the parts of the rows' values, to be added after a barrier.
  __device__ static void write_parts(const float (&values)[2], float (*parts)[M]) {
    for (int half = 0; half < 2; ++half) {
      const float sum = lane_sum<4>(values[half]);
      if (threadIdx.x % 4 == 0) parts[threadIdx.x / 32 % kSplit][row() + half * 8] = sum;
    }
  }
  // parts [M / 16][N]: of the sums of columns, to be added after a barrier.
  __device__ void write_column_parts(float (*parts)[N]) {
    for (int i = 0; i < 2 * kTiles; ++i) {
      float sum = sums[i / 2][i % 2] + sums[i / 2][i % 2 + 2];
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (threadIdx.x % 32 < 4) parts[first_row() / 16][column(i / 2) + i % 2] = sum;
    }
  }
  __device__ static float add_parts(const float (*parts)[M], int row) {
    float sum = 0;
    for (int i = 0; i < kSplit; ++i) sum += parts[i][row];
    return sum;
  }
};

// What launch_with gives a block.
template <typename Shared>
__device__ Shared& shared_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return *reinterpret_cast<Shared*>(memory);
}

// Starts copying a tile [R, W] from rows `stride` apart, of which so many rows and columns exist (whole packs); the
// rest is zero. It is there after __pipeline_commit, __pipeline_wait_prior and a barrier.
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

// Launches `kernel` with that shared memory; no blocks: nothing.
template <typename Shared, typename... Parameters, typename... Arguments>
void launch_with(void (*kernel)(Parameters...), int64_t blocks, const Arguments&... arguments) {
  static_assert(sizeof(Shared) <= 232448, "more shared memory than a block may have on Hopper");
  if (blocks == 0) return;
  MARROW_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  kernel<<<static_cast<unsigned>(blocks), kProductThreads, sizeof(Shared), current_stream()>>>(arguments...);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
