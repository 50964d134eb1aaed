#include <bit>

#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // heads that a thread loads before it stores the first of them

// The operator's inputs and outputs, or the gradients of both.
template <typename T>
struct Matrices {
  T *q, *kv, *k_rope, *q_out, *k_out, *v_out;
};

// Where a column of a head is in an input and in an output.
template <typename T>
struct Column {
  T *in, *out;            // in the token's first head
  int in_step, out_step;  // to the next head; in_step 0: in k_rope, which all heads share
  int rope;               // its number among the rotary columns; negative: none of them
};

// `column` counts those of q, of k, and of v. Selects, as after branches nvcc no longer knows the memory for global.
template <typename T>
__device__ __forceinline__ Column<T> find_column(const MlaRopeArgs& args, const Matrices<T>& of, int64_t token,
                                                 int column) {
  const int n = static_cast<int>(args.nope), r = static_cast<int>(args.rope), v = static_cast<int>(args.value);
  const int qk = n + r, part = (column >= qk) + (column >= 2 * qk), rest = column - part * qk;
  const bool shared = part == 1 && rest >= n;
  const int64_t head = token * args.heads;
  Column<T> found;
  found.rope = part == 2 ? -1 : rest - n;
  found.out_step = part == 2 ? v : qk;
  found.out = (part == 0 ? of.q_out : part == 1 ? of.k_out : of.v_out) + head * found.out_step + rest;
  found.in_step = shared ? 0 : part == 0 ? qk : n + v;
  const int64_t at = shared ? token * r + found.rope : head * found.in_step + rest + (part == 2 ? n : 0);
  found.in = (shared ? of.k_rope : part == 0 ? of.q : of.kv) + at;
  return found;
}

// Pairs turned by their angles, in fp32; by fmaf, as else nvcc chooses anew for each form which product to round.
template <typename T, int N>
__device__ __forceinline__ void turn(T (&x)[N], const float (&cos)[N / 2], const float (&sin)[N / 2]) {
  for (int i = 0; i < N / 2; ++i) {
    const float a = static_cast<float>(x[2 * i]), b = static_cast<float>(x[2 * i + 1]);
    x[2 * i] = static_cast<T>(fmaf(a, cos[i], -(b * sin[i])));
    x[2 * i + 1] = static_cast<T>(fmaf(b, cos[i], a * sin[i]));
  }
}

// A head's columns are `packs` of N. A block has kThreads of them at most, of one token; a thread keeps one, and with
// it its angles, over every `groups`-th head.
template <typename T, int N, bool kBackward>
__global__ void __launch_bounds__(kThreads) move_heads(MlaRopeArgs args, Matrices<T> of, int packs) {
  using Words = Pack<unsigned, N * sizeof(T) / sizeof(unsigned)>;  // copying T, nvcc spends a register on each
  const int heads = static_cast<int>(args.heads), lanes = min(packs, kThreads), groups = kThreads / lanes;
  const int group = static_cast<int>(threadIdx.x) / lanes;
  const int pack = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x) % lanes;
  const bool used = group < groups && pack < packs;
  const int64_t token = blockIdx.x;
  const Column<T> column = find_column(args, of, token, used ? pack * N : 0);
  const int from_step = kBackward ? column.out_step : column.in_step;
  const int to_step = kBackward ? column.in_step : column.out_step;
  const T* from = (kBackward ? column.out : column.in) + group * from_step;
  T* to = (kBackward ? column.in : column.out) + group * to_step;
  const bool summed = kBackward && to_step == 0;
  float cos[N / 2] = {}, sin[N / 2] = {}, sum[N] = {};
  if (column.rope >= 0) {
    const int64_t angle = (args.positions[token] * args.rope + column.rope) / 2;
    load_pack<N / 2>(args.cos + angle, cos);
    load_pack<N / 2>(args.sin + angle, sin);
    for (int i = 0; kBackward && i < N / 2; ++i) sin[i] = -sin[i];
  }
  for (int head = used ? group : heads; head < heads; head += kInFlight * groups) {
    Words taken[kInFlight];
    for (int i = 0; i < kInFlight; ++i, from += groups * from_step) {
      if (head + i * groups < heads) taken[i] = *reinterpret_cast<const Words*>(from);
    }
    for (int i = 0; i < kInFlight; ++i, to += groups * to_step) {
      if (head + i * groups >= heads) break;
      if (column.rope >= 0) {
        auto own = std::bit_cast<Pack<T, N>>(taken[i]);
        for (int j = 0; summed && j < N; ++j) sum[j] += static_cast<float>(own.items[j]);
        if (!summed) turn(own.items, cos, sin);
        taken[i] = std::bit_cast<Words>(own);
      }
      if (!summed) *reinterpret_cast<Words*>(to) = taken[i];
    }
  }
  if constexpr (kBackward) {
    __shared__ float sums[kThreads][N];
    for (int j = 0; j < N; ++j) sums[threadIdx.x][j] = sum[j];
    __syncthreads();
    if (!used || !summed || group > 0) return;
    for (int other = 1; other < groups; ++other) {
      for (int j = 0; j < N; ++j) sum[j] += sums[threadIdx.x + other * lanes][j];
    }
    turn(sum, cos, sin);
    store_pack<N>(to, sum);
  }
}

template <bool kBackward>
void launch(const MlaRopeArgs& args, View q, View kv, View k_rope, View q_out, View k_out, View v_out) {
  // All three sizes are multiples of a power of two if their bits together are.
  const bool packs = in_packs(args.nope | args.rope | args.value, q, kv, k_rope, q_out, k_out, v_out) &&
                     aligned_to(args.cos, 16) && aligned_to(args.sin, 16);
  launch_packs<2>(q.bf16, packs, [&]<typename T, int N>() {
    const int count = static_cast<int>(2 * (args.nope + args.rope) + args.value) / N;
    const dim3 blocks(blocks_for(q.rows, 1), blocks_for(count, kThreads));
    move_heads<T, N, kBackward>
        <<<blocks, kThreads, 0, current_stream()>>>(args, Matrices<T>{q, kv, k_rope, q_out, k_out, v_out}, count);
  });
}

}  // namespace

void mla_rope_forward_cuda(const MlaRopeArgs& args, View q, View kv, View k_rope, View q_out, View k_out, View v_out) {
  launch<false>(args, q, kv, k_rope, q_out, k_out, v_out);
}

void mla_rope_backward_cuda(const MlaRopeArgs& args, View dq_out, View dk_out, View dv_out, View dq, View dkv,
                            View dk_rope) {
  launch<true>(args, dq, dkv, dk_rope, dq_out, dk_out, dv_out);
}

}  // namespace marrow
