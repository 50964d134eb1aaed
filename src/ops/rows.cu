#include "ops/fp8_rows.cuh"

namespace marrow {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kPairsPerWarp = kPairsPerBlock / kWarps;
constexpr int kMaxExperts = 1024;

struct Pairs {
  const int32_t* experts;  // [T, k]
  int64_t pairs, top_k;
  int groups, each;
  __device__ int key(int64_t pair) const {
    return pair < pairs ? pair_sort_key(experts, pair, top_k, groups, each) : -1;
  }
};

__global__ void count_pairs(Pairs pairs, int32_t* block_rows) {
  __shared__ int counts[kMaxExperts];
  const int expert_count = pairs.groups;
  for (int e = threadIdx.x; e < expert_count; e += kThreads) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < kPairsPerBlock; i += kThreads) {
    const int expert = pairs.key(int64_t{blockIdx.x} * kPairsPerBlock + i);
    if (expert >= 0) atomicAdd(&counts[expert], 1);  // integers: any order gives the same sum
  }
  __syncthreads();
  for (int e = threadIdx.x; e < expert_count; e += kThreads) {
    block_rows[int64_t{blockIdx.x} * expert_count + e] = counts[e];
  }
}

// One block. Turns counts per (block, expert) into the first row of each, and writes the offsets.
// Thread (e, part) owns a share of the blocks for expert e.
__global__ void scan_blocks(int32_t* block_rows, int blocks, int expert_count, int parts, int32_t* offsets) {
  __shared__ int totals[kMaxExperts];
  __shared__ int starts[kMaxExperts];
  const int e = threadIdx.x % expert_count, part = threadIdx.x / expert_count;
  const bool active = part < parts;
  const int share = (blocks + parts - 1) / parts;
  const int begin = min(part * share, blocks), end = min(begin + share, blocks);
  int total = 0;
  if (active) {
#pragma unroll 8
    for (int b = begin; b < end; ++b) total += block_rows[int64_t{b} * expert_count + e];
    totals[part * expert_count + e] = total;
  }
  __syncthreads();
  if (threadIdx.x < expert_count) {
    int sum = 0;
    for (int p = 0; p < parts; ++p) sum += totals[p * expert_count + threadIdx.x];
    starts[threadIdx.x] = sum;
  }
  __syncthreads();
  for (int step = 1; step < expert_count; step *= 2) {  // inclusive scan over experts
    int add = 0;
    if (threadIdx.x < expert_count && threadIdx.x >= step) add = starts[threadIdx.x - step];
    __syncthreads();
    if (threadIdx.x < expert_count) starts[threadIdx.x] += add;
    __syncthreads();
  }
  if (threadIdx.x < expert_count) offsets[threadIdx.x] = starts[threadIdx.x];
  if (!active) return;
  int row = e == 0 ? 0 : starts[e - 1];
  for (int p = 0; p < part; ++p) row += totals[p * expert_count + e];
#pragma unroll 8
  for (int b = begin; b < end; ++b) {
    const int64_t at = int64_t{b} * expert_count + e;
    const int count = block_rows[at];
    block_rows[at] = row;
    row += count;
  }
}

// Warp w of a block owns the w-th share of its pairs, in order; next[w][e] is its next row of e.
__global__ void place_pairs(Pairs pairs, const int32_t* block_rows, const int32_t* offsets, int32_t* source_of_row,
                            int32_t* rows_of_source, int32_t* slot_of_row) {
  extern __shared__ int next[];  // [kWarps, expert_count]
  const int expert_count = pairs.groups;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * expert_count; i += kThreads) next[i] = 0;
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * kPairsPerBlock + warp * kPairsPerWarp;
  for (int i = lane; i < kPairsPerWarp; i += 32) {
    const int expert = pairs.key(first + i);
    if (expert >= 0) atomicAdd(&next[warp * expert_count + expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < expert_count; e += kThreads) {
    int row = block_rows[int64_t{blockIdx.x} * expert_count + e];
    for (int w = 0; w < kWarps; ++w) {
      const int count = next[w * expert_count + e];
      next[w * expert_count + e] = row;
      row += count;
    }
  }
  __syncthreads();
  const int64_t total = offsets[expert_count - 1];
  for (int i = lane; i < kPairsPerWarp; i += 32) {  // kPairsPerWarp is a multiple of 32
    const int64_t pair = first + i;
    const int expert = pairs.key(pair);
    const unsigned peers = __match_any_sync(~0u, expert);
    const int rank = __popc(peers & ((1u << lane) - 1));
    int* counter = &next[warp * expert_count + max(expert, 0)];
    const int row = *counter + rank;
    __syncwarp();
    if (expert >= 0 && rank == 0) *counter += __popc(peers);
    __syncwarp();
    if (pair >= pairs.pairs) continue;
    rows_of_source[pair] = expert >= 0 ? row : -1;
    if (expert >= 0) {
      source_of_row[row] = static_cast<int32_t>(pair / pairs.top_k);
      slot_of_row[row] = static_cast<int32_t>(pair);
    }
    if (pair >= total) {  // no row of that number exists
      source_of_row[pair] = -1;
      slot_of_row[pair] = -1;
    }
  }
}

// One warp a row; eight 16-byte loads in flight a lane.
template <typename Vector>
__global__ void gather(const Vector* x, const int32_t* source, Vector* out, RowCount count, int64_t width) {
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (!count.has(row)) return;
  const int64_t from = source[row];
  const int lane = threadIdx.x % 32;
  const Vector* in = x + from * width;
  out += row * width;
  constexpr int kUnroll = 8;
  for (int64_t base = lane; base < width; base += 32 * kUnroll) {
    Vector values[kUnroll];
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * 32;
      values[u] = from >= 0 && i < width ? __ldg(in + i) : Vector{};
    }
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * 32;
      if (i < width) __stcs(out + i, values[u]);
    }
  }
}

// The same for experts' rows: one warp a token, which is read once and written for each of its experts, since tokens do
// not stay in the cache until the next expert. kFp8: with the rows' form in fp8.
template <bool kFp8>
__global__ void scatter(const uint4* x, const int32_t* rows_of_source, uint4* out,
                        const __grid_constant__ Fp8RowWriter fp8, RowCount count, int64_t tokens, int64_t sources,
                        int64_t width) {
  const int64_t token = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (token >= tokens) return;
  const int lane = threadIdx.x % 32;
  const uint4* in = x + token * width;
  for (int64_t group = 0; group < sources; group += 32) {  // a lane knows one of the token's rows
    int row = group + lane < sources ? rows_of_source[token * sources + group + lane] : -1;
    if (row >= 0 && !count.has(row)) row = -1;
    const unsigned used = __ballot_sync(~0u, row >= 0);
    if (used == 0) continue;
    Fp8Place place{};
    constexpr int kUnroll = 8;
    for (int64_t first = lane; first - lane < width; first += 32 * kUnroll) {
      uint4 values[kUnroll];
      Fp8RowWriter::Eight eights[kUnroll];
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = first + u * 32;
        values[u] = i < width ? __ldg(in + i) : uint4{};
      }
      if constexpr (kFp8) {
        if (first == lane && row >= 0) place = fp8.place(row);  // while the loads are under way
        for (int u = 0; u < kUnroll; ++u) {
          eights[u] = Fp8RowWriter::convert(*reinterpret_cast<const Pack<bf16, 8>*>(&values[u]));
        }
      }
      for (unsigned left = used; left != 0; left &= left - 1) {
        const int owner = __popc((left & -left) - 1);
        const int64_t to = __shfl_sync(~0u, row, owner);
        Fp8Place at{};
        if constexpr (kFp8) at = {__shfl_sync(~0u, place.first, owner), __shfl_sync(~0u, place.step, owner)};
        for (int u = 0; u < kUnroll; ++u) {
          const int64_t i = first + u * 32;
          if (i < width) __stcs(out + to * width + i, values[u]);
          if constexpr (kFp8) fp8.store(at, to, i * 8, eights[u]);
        }
      }
    }
  }
}

// A block's y index is a token; each thread sums one pack of columns over the token's rows.
template <typename T, int kSize>
__global__ void sum(const T* rows, const int32_t* rows_of_source, const T* residual, T* out, int64_t count,
                    int64_t sources, int64_t row_count, int64_t width) {
  using Packed = Pack<T, kSize>;
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= count) return;
  const int32_t* indices = rows_of_source + token * sources;
  for (int64_t column = int64_t{threadIdx.x} * kSize; column < width; column += int64_t{blockDim.x} * kSize) {
    float totals[kSize] = {};
    if (residual != nullptr) {
      load_pack<kSize>(residual + token * width + column, totals);
    }
    constexpr int kUnroll = 8;
    for (int64_t j0 = 0; j0 < sources; j0 += kUnroll) {
      Packed loaded[kUnroll];
      bool valid[kUnroll];
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t index = j0 + u < sources ? __ldg(indices + j0 + u) : -1;
        valid[u] = index >= 0 && index < row_count;
        if (valid[u]) loaded[u] = *reinterpret_cast<const Packed*>(rows + index * width + column);
      }
      for (int u = 0; u < kUnroll; ++u) {
        if (!valid[u]) continue;
        for (int i = 0; i < kSize; ++i) totals[i] += static_cast<float>(loaded[u].items[i]);
      }
    }
    store_pack<kSize>(out + token * width + column, totals);
  }
}

__global__ void gather_scalars(const float* values, const int32_t* index, float* out, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int32_t from = index[i];
  out[i] = from >= 0 ? values[from] : 0.0f;
}

}  // namespace

void sort_pairs_cuda(View experts, int64_t each, View block_rows, View offsets, View source_of_row, View rows_of_source,
                     View slot_of_row) {
  const int groups = static_cast<int>(offsets.elements);
  const Pairs pairs{experts, experts.elements, experts.width, groups, static_cast<int>(each)};
  const unsigned blocks = blocks_for(pairs.pairs, kPairsPerBlock);
  if (blocks > 0) count_pairs<<<blocks, kThreads, 0, current_stream()>>>(pairs, block_rows);
  scan_blocks<<<1, 1024, 0, current_stream()>>>(block_rows, static_cast<int>(blocks), groups, 1024 / groups, offsets);
  if (blocks > 0) {
    place_pairs<<<blocks, kThreads, kWarps * groups * sizeof(int), current_stream()>>>(
        pairs, block_rows, offsets, source_of_row, rows_of_source, slot_of_row);
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void gather_rows_cuda(View x, View source, View rows_of_source, View out, const ExpertRowsView& of_out) {
  if (out.elements == 0) return;
  const RowCount count(out.rows, of_out.offsets);
  const int64_t bytes = out.width * (x.bf16 ? 2 : 4);
  const bool packs = bytes % 16 == 0 && aligned_to(x.data, 16) && aligned_to(out.data, 16);
  if (of_out.data.defined() || (packs && of_out.offsets.defined())) {
    if (x.rows == 0) return;
    const auto launch = [&]<bool kFp8>() {
      scatter<kFp8><<<blocks_for(x.rows * 32, kThreads), kThreads, 0, current_stream()>>>(
          x, rows_of_source, out, Fp8RowWriter(of_out, out.width), count, x.rows, rows_of_source.width, bytes / 16);
      MARROW_CUDA_CHECK(cudaGetLastError());
    };
    return of_out.data.defined() ? launch.template operator()<true>() : launch.template operator()<false>();
  }
  launch_packs(x.bf16, packs, [&]<typename T, int kSize>() {
    using Bits = std::conditional_t<sizeof(T) == 2, unsigned short, unsigned>;
    using Vector = std::conditional_t<kSize == 1, Bits, uint4>;
    gather<Vector><<<blocks_for(out.rows * 32, kThreads), kThreads, 0, current_stream()>>>(
        x, source, out, count, bytes / static_cast<int64_t>(sizeof(Vector)));
  });
}

void sum_rows_cuda(View rows, View rows_of_source, View residual, View out) {
  if (out.elements == 0) return;
  const bool packs = in_packs(out.width, rows, out, residual);
  launch_packs(rows.bf16, packs, [&]<typename T, int kSize>() {
    unsigned columns = 32;
    while (columns < kThreads && columns * kSize < out.width) columns *= 2;
    const dim3 block(columns, kThreads / columns);
    sum<T, kSize><<<blocks_for(out.rows, block.y), block, 0, current_stream()>>>(
        rows, rows_of_source, residual, out, out.rows, rows_of_source.width, rows.rows, out.width);
  });
}

void gather_values_cuda(View values, View index, View out) {
  if (index.elements == 0) return;
  gather_scalars<<<blocks_for(index.elements, kThreads), kThreads, 0, current_stream()>>>(values, index, out,
                                                                                          index.elements);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
