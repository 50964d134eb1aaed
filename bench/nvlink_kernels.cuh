// Device code of nvlink_dispatch.h. It needs no more of CUDA than tests/parallel/resident_blocks.h can imitate, so that
// the CPU can run all ranks in one process.
#pragma once
#include "nvlink_dispatch.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif

namespace marrow::nvlink {

#ifdef __CUDACC__
__device__ __forceinline__ void store_flag(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_flag(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void give_up() {
  __threadfence_system();
  __trap();
}
__device__ __forceinline__ uint4 load_once(const uint4* from) { return __ldcs(from); }
__device__ __forceinline__ void store_once(uint4* to, uint4 value) { __stcs(to, value); }
__device__ __forceinline__ uint32_t to_bf16(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
#endif

template <typename T>
__device__ __forceinline__ T* part(const Exchange& x, int rank, int64_t offset) {
  return reinterpret_cast<T*>(x.windows[rank] + offset);
}

__device__ inline void wait_for(const Exchange& x, int rank, int block, uint32_t epoch) {
  const uint32_t* flag = part<uint32_t>(x, x.rank, x.flags) + rank * kMaxBlocks + block;
  const uint64_t start = nanoseconds();
  for (;;) {
    const uint32_t has = load_flag(flag);
    if (static_cast<int32_t>(has - epoch) >= 0) return;  // the epoch may go round
    if (nanoseconds() - start > x.patience) {
      *x.stuck = {1, x.rank, static_cast<int32_t>(blockIdx.x), rank, block, has, epoch};
      give_up();
    }
  }
}

// What this block wrote before is seen after it by the same block of every rank, or by all their blocks. Where a
// kernel's blocks all end with it, the kernel's end means that every rank has come so far.
template <bool kAllBlocks>
__device__ inline void meet(const Exchange& x, uint32_t epoch) {
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < x.ranks) {
    store_flag(part<uint32_t>(x, static_cast<int>(threadIdx.x), x.flags) + x.rank * kMaxBlocks + blockIdx.x, epoch);
  }
  const int blocks = kAllBlocks ? static_cast<int>(gridDim.x) : 1;
  for (int i = static_cast<int>(threadIdx.x); i < x.ranks * blocks; i += static_cast<int>(blockDim.x)) {
    wait_for(x, i / blocks, kAllBlocks ? i % blocks : static_cast<int>(blockIdx.x), epoch);
  }
  __syncthreads();
}

// The expert of a pair, or -1 past the end and outside the range.
__device__ __forceinline__ int expert_at(const int32_t* choices, int64_t pair, int64_t end, int64_t experts) {
  if (pair >= end) return -1;
  const int expert = choices[pair];
  return expert >= 0 && expert < experts ? expert : -1;
}

constexpr int plan_shared_ints(int64_t experts) { return static_cast<int>((kWarps + 2) * experts); }

// Each block has a share of the tokens, each of its warps a share of the block's pairs, in order. Every rank gets the
// counts of all blocks, and so each block knows where its pairs of an expert begin, on whatever rank.
__device__ inline void make_plan(const Exchange& x, uint32_t epoch, const Plan& plan, int* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32, threads = static_cast<int>(blockDim.x);
  const int experts = static_cast<int>(x.experts), own = experts / x.ranks;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  int* next = shared;                     // [warps, E]: pairs in this block before the warp's next; then its row
  int* total = shared + warps * experts;  // [E]: pairs of all ranks
  int* before = total + experts;          // [E]: of them, those of ranks and blocks before this one
  const int64_t share = (x.tokens + blocks - 1) / blocks;
  const int64_t first_token = share * block < x.tokens ? share * block : x.tokens;
  const int64_t last_token = first_token + share < x.tokens ? first_token + share : x.tokens;
  const int64_t begin = first_token * x.top_k, end = last_token * x.top_k;
  const int64_t per_warp = ((end - begin + warps - 1) / warps + 31) / 32 * 32;
  const int64_t warp_begin = begin + warp * per_warp, own_pairs = x.rank * x.tokens * x.top_k;

  for (int i = static_cast<int>(threadIdx.x); i < (warps + 2) * experts; i += threads) shared[i] = 0;
  __syncthreads();
  for (int64_t i = lane; i < per_warp; i += 32) {
    const int expert = expert_at(plan.choices, warp_begin + i, end, experts);
    if (expert >= 0) atomicAdd(&next[warp * experts + expert], 1);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads) {
    int sum = 0;
    for (int w = 0; w < warps; ++w) {
      const int count = next[w * experts + e];
      next[w * experts + e] = sum;
      sum += count;
    }
    for (int r = 0; r < x.ranks; ++r) {
      part<int32_t>(x, r, x.counts)[(x.rank * kMaxBlocks + block) * experts + e] = sum;
    }
  }
  for (int64_t i = begin + threadIdx.x; i < end; i += threads) {
    for (int r = 0; r < x.ranks; ++r) part<float>(x, r, x.weights)[own_pairs + i] = plan.weights[i];
  }
  for (int64_t i = first_token * x.ranks + threadIdx.x; i < last_token * x.ranks; i += threads) {
    const int64_t token = i / x.ranks, rank = i % x.ranks;
    bool any = false;
    for (int64_t j = 0; j < x.top_k; ++j) {
      const int expert = expert_at(plan.choices, token * x.top_k + j, end, experts);
      any = any || (expert >= 0 && expert / own == rank);
    }
    plan.rows_of_token[i] = any ? static_cast<int32_t>(rank * x.tokens + token) : -1;
  }
  meet<true>(x, epoch + 1);

  const int parts = threads > experts ? threads / experts : 1;
  const auto* counts = part<const int32_t>(x, x.rank, x.counts);
  for (int i = static_cast<int>(threadIdx.x); i < parts * experts; i += threads) {
    const int e = i % experts;
    int sum = 0, earlier = 0;
#pragma unroll 4
    for (int s = i / experts; s < x.ranks * blocks; s += parts) {
      const int rank = s / blocks, other = s % blocks;
      const int count = counts[(rank * kMaxBlocks + other) * experts + e];
      sum += count;
      if (rank < x.rank || (rank == x.rank && other < block)) earlier += count;
    }
    atomicAdd(&total[e], sum);
    atomicAdd(&before[e], earlier);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads) {
    int start = 0;
    for (int f = e / own * own; f < e; ++f) start += total[f];
    for (int w = 0; w < warps; ++w) next[w * experts + e] += start + before[e];
    if (block == 0 && e / own == x.rank) plan.offsets[e % own] = start + total[e];
  }
  __syncthreads();
  for (int64_t i = lane; i < per_warp; i += 32) {  // per_warp is a multiple of 32
    const int64_t pair = warp_begin + i;
    const int expert = expert_at(plan.choices, pair, end, experts);
    const unsigned same = __match_any_sync(~0u, expert);
    const int order = __popc(same & ((1u << lane) - 1));
    int* counter = &next[warp * experts + (expert < 0 ? 0 : expert)];
    const int row = *counter + order;
    __syncwarp();
    if (expert >= 0 && order == 0) *counter += __popc(same);
    __syncwarp();
    if (pair >= end) continue;
    for (int r = 0; r < x.ranks; ++r) {
      part<int32_t>(x, r, x.rows_of_pair)[own_pairs + pair] = expert >= 0 && expert / own == r ? row : -1;
    }
  }
  meet<true>(x, epoch + 2);  // also what the same kernel's other blocks go on with
}

constexpr int kInFlight = 8;  // 16-byte loads of a lane

// A row of `packs` packs into registers, 32 · kInFlight of them from `first` on; and out of them.
__device__ __forceinline__ void load_packs(const uint4* row, int first, int packs, uint4 (&values)[kInFlight]) {
  for (int u = 0; u < kInFlight; ++u) {
    const int at = first + u * 32;
    if (at < packs) values[u] = load_once(row + at);
  }
}
__device__ __forceinline__ void store_packs(uint4* row, int first, int packs, const uint4 (&values)[kInFlight]) {
  for (int u = 0; u < kInFlight; ++u) {
    const int at = first + u * 32;
    if (at < packs) store_once(row + at, values[u]);
  }
}

// The tokens of all ranks, dealt out to warps: a warp's next one is the same token of the next rank, so that what is
// near and what is far are under way at the same time.
struct TokenWalk {
  int token, source, turn;  // `turn` ranks of this token are done

  __device__ __forceinline__ explicit TokenWalk(const Exchange& x)
      : token(static_cast<int>(blockIdx.x + threadIdx.x / 32 * gridDim.x)), source(x.rank), turn(0) {}
  __device__ __forceinline__ bool there(const Exchange& x) const { return token < x.tokens; }
  __device__ __forceinline__ int64_t slot(const Exchange& x) const { return source * x.tokens + token; }
  __device__ __forceinline__ void advance(const Exchange& x) {
    source = source + 1 == x.ranks ? 0 : source + 1;
    if (++turn < x.ranks) return;
    turn = 0;
    token += static_cast<int>(gridDim.x * (blockDim.x / 32));
  }
  // The row of this rank's experts that lane j's pair of the token has, or -1.
  __device__ __forceinline__ int row(const Exchange& x, int lane) const {
    if (lane >= x.top_k || !there(x)) return -1;
    return part<const int32_t>(x, x.rank, x.rows_of_pair)[slot(x) * x.top_k + lane];
  }
};

// A warp a token: its row is read once, and written for each of its pairs. kPull: out of the ranks' windows, which
// hold it until all have met; else out of what they pushed, and `tokens`.
template <bool kPull>
__device__ inline void spread_rows(const Exchange& x, uint32_t epoch, const char* tokens, char* rows,
                                   float* row_weights) {
  if (kPull) meet<false>(x, epoch + 1);
  const int lane = static_cast<int>(threadIdx.x) % 32, packs = static_cast<int>(x.row_bytes / 16);
  TokenWalk walk(x);
  int row = walk.row(x, lane);
  while (walk.there(x)) {
    const int64_t slot = walk.slot(x);
    const char* from = kPull                   ? x.windows[walk.source] + x.own_tokens + walk.token * x.row_bytes
                       : walk.source == x.rank ? tokens + walk.token * x.row_bytes
                                               : x.windows[x.rank] + x.arrived + slot * x.row_bytes;
    walk.advance(x);
    const int following = walk.row(x, lane);
    const unsigned wanted = __ballot_sync(~0u, row >= 0);
    if (row >= 0) row_weights[row] = part<const float>(x, x.rank, x.weights)[slot * x.top_k + lane];
    for (int chunk = wanted != 0 ? 0 : packs; chunk < packs; chunk += 32 * kInFlight) {
      uint4 values[kInFlight];
      load_packs(reinterpret_cast<const uint4*>(from), chunk + lane, packs, values);
      for (unsigned left = wanted; left != 0; left &= left - 1) {
        const int64_t to = __shfl_sync(~0u, row, __ffs(left) - 1);
        store_packs(reinterpret_cast<uint4*>(rows + to * x.row_bytes), chunk + lane, packs, values);
      }
    }
    row = following;
  }
  if (kPull) meet<false>(x, epoch + 2);
}

// A warp a token of this rank: its row is read once, and written to each other rank that has an expert for it.
__device__ inline void push_rows(const Exchange& x, uint32_t epoch, const int32_t* choices, const char* tokens) {
  meet<false>(x, epoch + 1);
  const int lane = static_cast<int>(threadIdx.x) % 32, packs = static_cast<int>(x.row_bytes / 16);
  const int own = static_cast<int>(x.experts) / x.ranks;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  for (int64_t t = blockIdx.x + static_cast<int64_t>(threadIdx.x / 32) * gridDim.x; t < x.tokens; t += step) {
    const int64_t pairs = (t + 1) * x.top_k;
    const int expert = lane < x.top_k ? expert_at(choices, t * x.top_k + lane, pairs, x.experts) : -1;
    const unsigned wanted = __reduce_or_sync(~0u, expert >= 0 ? 1u << (expert / own) : 0u);
    for (int chunk = 0; chunk < packs; chunk += 32 * kInFlight) {
      uint4 values[kInFlight];
      load_packs(reinterpret_cast<const uint4*>(tokens + t * x.row_bytes), chunk + lane, packs, values);
      for (int n = 1; n < x.ranks; ++n) {
        const int peer = (x.rank + n) % x.ranks;
        if ((wanted >> peer & 1) == 0) continue;
        char* to = x.windows[peer] + x.arrived + (x.rank * x.tokens + t) * x.row_bytes;
        store_packs(reinterpret_cast<uint4*>(to), chunk + lane, packs, values);
      }
    }
  }
  meet<false>(x, epoch + 2);
}

__device__ __forceinline__ void add_pack(uint4 values, float (&totals)[8]) {
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
  for (int i = 0; i < 4; ++i) {
    totals[2 * i] += __uint_as_float(words[i] << 16);
    totals[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
  }
}

// A warp a token of any rank: the sum of its rows goes to its rank.
__device__ inline void combine_rows(const Exchange& x, uint32_t epoch, const char* rows) {
  constexpr int kRows = 4, kPacks = 2;
  meet<false>(x, epoch + 1);
  const int lane = static_cast<int>(threadIdx.x) % 32, packs = static_cast<int>(x.row_bytes / 16);
  TokenWalk walk(x);
  int row = walk.row(x, lane);
  while (walk.there(x)) {
    char* to = x.windows[walk.source] + x.partials + (x.rank * x.tokens + walk.token) * x.row_bytes;
    walk.advance(x);
    const int following = walk.row(x, lane);
    const unsigned wanted = __ballot_sync(~0u, row >= 0);
    for (int at = wanted != 0 ? lane : packs; at - lane < packs; at += 32 * kPacks) {
      const bool inside[kPacks] = {at < packs, at + 32 < packs};
      float totals[kPacks][8] = {};
      for (unsigned left = wanted; left != 0;) {
        uint4 values[kRows][kPacks];
        const int count = __popc(left);
        for (int j = 0; j < kRows; ++j) {
          const int64_t from = __shfl_sync(~0u, row, left != 0 ? __ffs(left) - 1 : 0);
          left &= left - 1;
          const uint4* in = reinterpret_cast<const uint4*>(rows + from * x.row_bytes) + at;
          for (int u = 0; u < kPacks; ++u) values[j][u] = j < count && inside[u] ? load_once(in + u * 32) : uint4{};
        }
        for (int j = 0; j < kRows; ++j) {
          for (int u = 0; u < kPacks; ++u) add_pack(values[j][u], totals[u]);
        }
      }
      for (int u = 0; u < kPacks; ++u) {
        const float(&sum)[8] = totals[u];
        if (!inside[u]) continue;
        store_once(reinterpret_cast<uint4*>(to) + at + u * 32, {to_bf16(sum[0], sum[1]), to_bf16(sum[2], sum[3]),
                                                                to_bf16(sum[4], sum[5]), to_bf16(sum[6], sum[7])});
      }
    }
    row = following;
  }
  meet<false>(x, epoch + 2);
}

}  // namespace marrow::nvlink
