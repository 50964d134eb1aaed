// Chunks of rows (section 3.3 of the paper), with the names of gated_delta_rule.cpp: U = (I + A)⁻¹ β (V − e^G K S) is
// u − w S. What needs no state is done for all chunks at once (prepare, read, gradients); a walk over the chunks of a
// segment and head carries the state, or back the gradient of it, a slice of Dv columns a block.
#include "ops/block_product.cuh"

namespace marrow {
namespace {

using Args = GatedDeltaRuleArgs;

template <typename T>
constexpr int kRows = sizeof(T) == 2 ? kDeltaRowsBf16 : kDeltaRowsFp32;  // tokens of a chunk

template <typename T>
__device__ T* data(const View& view) {
  return static_cast<T*>(view.data);
}

// The place of a segment's first chunk; the next segment's comes after its last.
__device__ int64_t first_place(const Args& args, int64_t segment, int rows) {
  return data<int32_t>(args.starts)[segment] / rows + segment;
}

struct Chunk {
  int64_t index, first, rows, head, key_head;  // index: of its place and head in scratch

  // Of a place; no rows where it is unused.
  __device__ static Chunk at_place(const Args& args, int64_t place, int64_t head, int chunk_rows) {
    int64_t segment = 0;
    for (int64_t end = args.segments; end - segment > 1;) {
      const int64_t middle = (segment + end) / 2;
      (first_place(args, middle, chunk_rows) <= place ? segment : end) = middle;
    }
    return of_segment(args, segment, place - first_place(args, segment, chunk_rows), head, chunk_rows);
  }
  __device__ static Chunk of_segment(const Args& args, int64_t segment, int64_t number, int64_t head, int chunk_rows) {
    const int32_t* starts = data<int32_t>(args.starts);
    const int64_t first = starts[segment] + number * chunk_rows;
    return {(first_place(args, segment, chunk_rows) + number) * args.value_heads + head, first,
            min(static_cast<int64_t>(chunk_rows), starts[segment + 1] - first), head,
            head / (args.value_heads / args.key_heads)};
  }
  template <typename T>
  __device__ const T* query(const Args& args) const {
    return data<T>(args.q) + first * args.q_stride + key_head * args.key_size;
  }
  template <typename T>
  __device__ const T* key(const Args& args) const {
    return data<T>(args.k) + first * args.k_stride + key_head * args.key_size;
  }
  template <typename T>
  __device__ const T* value(const Args& args) const {
    return data<T>(args.v) + first * args.v_stride + head * args.value_size;
  }
  // Of [T, Hv] and of a dense [T, Hv, Dv].
  __device__ int64_t gate_at(const Args& args, int row) const { return (first + row) * args.value_heads + head; }
  __device__ int64_t value_at(const Args& args) const { return gate_at(args, 0) * args.value_size; }
  template <typename T>
  __device__ T* scratch(const View& view, int64_t size) const {
    return data<T>(view) + index * size;
  }
};

template <int R>
struct Gates {
  double sum[R];  // G; differences of large sums must keep a small g
  float beta[R], entry[R], to_end[R];

  // By the first warp; rows that do not exist have g = β = 0.
  __device__ void load(const Args& args, const Chunk& chunk) {
    if (threadIdx.x >= 32) return;
    constexpr int kEach = R / 32;
    double own[kEach], total = 0;
    for (int j = 0; j < kEach; ++j) {
      const int row = threadIdx.x * kEach + j;
      const bool exists = row < chunk.rows;
      own[j] = total += exists ? data<float>(args.g)[chunk.gate_at(args, row)] : 0.0f;
      beta[row] = exists ? data<float>(args.beta)[chunk.gate_at(args, row)] : 0.0f;
    }
    double scan = total;
    for (int step = 1; step < 32; step *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, scan, step);
      if (threadIdx.x >= step) scan += before;
    }
    const double all = __shfl_sync(0xffffffffu, scan, 31);
    for (int j = 0; j < kEach; ++j) {
      const int row = threadIdx.x * kEach + j;
      sum[row] = scan - total + own[j];
      entry[row] = __expf(static_cast<float>(sum[row]));
      to_end[row] = __expf(static_cast<float>(all - sum[row]));
    }
  }
  // Rows i and j ≤ i, or j < i where `strictly`; 0 elsewhere.
  __device__ float decay(int i, int j, bool strictly = false) const {
    return j + strictly <= i ? __expf(static_cast<float>(sum[i] - sum[j])) : 0.0f;
  }
};

// The rows of a tile times `scale` / their length.
template <typename T, int P>
__device__ void scale_to_length(T* tile, float scale, float* inverse_length) {
  constexpr int kLanes = P / kPackOf<T>;
  for (int e = threadIdx.x; e < kRows<T> * kLanes; e += kProductThreads) {
    float values[kPackOf<T>], squares = 0;
    T* at = tile + e / kLanes * padded<T>(P) + e % kLanes * kPackOf<T>;
    load_pack<kPackOf<T>>(at, values);
    for (float value : values) squares += value * value;
    const float inverse = rsqrtf(lane_sum<kLanes>(squares) + 1e-6f);
    for (float& value : values) value *= inverse * scale;
    store_pack<kPackOf<T>>(at, values);
    if (e % kLanes == 0) inverse_length[e / kLanes] = inverse;
  }
}

// t = (I + a)⁻¹ for a below the diagonal: blocks of 16 on the diagonal, then row after row of blocks. All fp32, R + 4
// apart; x has room for 16 rows. Has a barrier before it reads a, and one at the end.
template <int R>
__device__ void invert(const float* a, float* t, float* x) {
  constexpr int kLd = R + 4;
  for (int e = threadIdx.x; e < R * R; e += kProductThreads) t[e / R * kLd + e % R] = 0.0f;
  __syncthreads();
  if (threadIdx.x < R) {
    const int corner = threadIdx.x / 16 * 16, column = threadIdx.x % 16;
    float values[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      values[r] = r == column ? 1.0f : 0.0f;
      for (int j = 0; j < r; ++j) values[r] -= a[(corner + r) * kLd + corner + j] * values[j];
      t[(corner + r) * kLd + corner + column] = values[r];
    }
  }
  __syncthreads();
  for (int row = 16; row < R; row += 16) {
    for (int e = threadIdx.x; e < 16 * row; e += kProductThreads) {
      const int r = e / row, c = e % row;
      float sum = 0;
      for (int j = c / 16 * 16; j < row; ++j) sum += a[(row + r) * kLd + j] * t[j * kLd + c];
      x[r * kLd + c] = sum;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < 16 * row; e += kProductThreads) {
      const int r = e / row, c = e % row;
      float sum = 0;
      for (int j = 0; j < 16; ++j) sum += t[(row + r) * kLd + row + j] * x[j * kLd + c];
      t[(row + r) * kLd + c] = -sum;
    }
    __syncthreads();
  }
}

template <typename T, int P>
struct PrepareShared {
  static constexpr int R = kRows<T>;
  alignas(128) T k[R * padded<T>(P)], v[R * padded<T>(P)], for_k[R * padded<T>(R)], for_v[R * padded<T>(R)];
  float a[R * (R + 4)], t[R * (R + 4)], x[16 * (R + 4)];
  Gates<R> gates;
  float inverse_length[R];
};

// w = (I + A)⁻¹ β e^G K and u = (I + A)⁻¹ β V.
template <typename T, int P>
__global__ __launch_bounds__(kProductThreads) void prepare(const __grid_constant__ Args args) {
  constexpr int R = kRows<T>, kLd = padded<T>(P), kLdR = padded<T>(R);
  auto& s = shared_memory<PrepareShared<T, P>>();
  const Chunk chunk = Chunk::at_place(args, blockIdx.x / args.value_heads, blockIdx.x % args.value_heads, R);
  if (chunk.rows <= 0) return;
  copy_tile<R, P>(chunk.key<T>(args), args.k_stride, chunk.rows, args.key_size, s.k);
  copy_tile<R, P>(chunk.value<T>(args), args.v_stride, chunk.rows, args.value_size, s.v);
  s.gates.load(args, chunk);
  wait_for_tiles();
  scale_to_length<T, P>(s.k, 1.0f, s.inverse_length);
  __syncthreads();
  BlockProduct<T, R, R> products;
  products.template add<false, true, P>(s.k, kLd, s.k, kLd);
  products.each([&](int r, int c, int, float(&pair)[2]) {
    for (int i = 0; i < 2; ++i) pair[i] *= s.gates.beta[r] * s.gates.decay(r, c + i, true);
  });
  products.store(s.a, R + 4);
  invert<R>(s.a, s.t, s.x);
  T* inverse = args.inverse.data != nullptr ? chunk.scratch<T>(args.inverse, R * R) : nullptr;
  for (int e = threadIdx.x; e < R * R; e += kProductThreads) {
    const int i = e / R, j = e % R;
    const float value = s.t[i * (R + 4) + j], scaled = value * s.gates.beta[j];
    s.for_k[i * kLdR + j] = static_cast<T>(scaled * s.gates.entry[j]);
    s.for_v[i * kLdR + j] = static_cast<T>(scaled);
    if (inverse != nullptr) inverse[e] = static_cast<T>(value);
  }
  if (threadIdx.x < R) {
    float* factors = chunk.scratch<float>(args.factors, 3 * R);
    factors[threadIdx.x] = s.gates.to_end[threadIdx.x] * s.inverse_length[threadIdx.x];
    factors[2 * R + threadIdx.x] = s.gates.entry[threadIdx.x];
  }
  __syncthreads();
  BlockProduct<T, R, P> w, u;
  w.template add<false, false, R>(s.for_k, kLdR, s.k, kLd);
  w.store(chunk.scratch<T>(args.w, R * P), P);
  u.template add<false, false, R>(s.for_v, kLdR, s.v, kLd);
  u.store(chunk.scratch<T>(args.u, R * P), P);
}

constexpr int kSlice = 64;  // columns of the state for a block that walks

template <typename T, int P, bool kBack>
struct WalkShared {
  static constexpr int R = kRows<T>, kTile = R * padded<T>(P), kPart = R * padded<T>(kSlice);
  struct Step {
    alignas(128) T w[kTile], k[kTile], u[kPart];
    alignas(128) T q[kBack ? kTile : 1], dy[kBack ? kPart : 1];
    alignas(128) float factors[3 * R];
  };
  Step steps[2];  // one is on its way
  alignas(128) T state[P * padded<T>(kSlice)];
};

// Forward: u −= w S, then S = e^G_end S + (e^(G_end − G) K)ᵀ u, chunk after chunk; from args.initial to `last`.
// Back: d_u += e^(G_end − G) K dS, then dS = e^G_end dS + (e^G Q)ᵀ dO − wᵀ d_u; from `from` to `last`. Each state goes
// into scratch as the chunk finds it.
template <typename T, int P, bool kBack>
__global__ __launch_bounds__(kProductThreads) void walk(const __grid_constant__ Args args, View d_out, View from,
                                                        View last) {
  constexpr int R = kRows<T>, S = kSlice, kLd = padded<T>(P), kLdS = padded<T>(S);
  using Shared = WalkShared<T, P, kBack>;
  auto& s = shared_memory<Shared>();
  const int64_t slice = blockIdx.x % (P / S) * S, item = blockIdx.x / (P / S);  // item: segment and head
  const int64_t segment = item / args.value_heads, head = item % args.value_heads, width = args.value_size - slice;
  const int32_t* starts = data<int32_t>(args.starts) + segment;
  const int64_t chunks = (starts[1] - starts[0] + R - 1) / R;
  const View &u_scratch = kBack ? args.d_u : args.u, &state_scratch = kBack ? args.d_states : args.states;
  const auto chunk_of = [&](int64_t number) {
    return Chunk::of_segment(args, segment, kBack ? chunks - 1 - number : number, head, R);
  };
  const auto start_copy = [&](int64_t number) {
    if (number >= chunks) return;
    typename Shared::Step& step = s.steps[number % 2];
    const Chunk chunk = chunk_of(number);
    copy_tile<R, P>(chunk.scratch<T>(args.w, R * P), P, R, P, step.w);
    copy_tile<R, P>(chunk.key<T>(args), args.k_stride, chunk.rows, args.key_size, step.k);
    copy_tile<R, S>(chunk.scratch<T>(u_scratch, R * P) + slice, P, R, S, step.u);
    if constexpr (kBack) {
      copy_tile<R, P>(chunk.query<T>(args), args.q_stride, chunk.rows, args.key_size, step.q);
      copy_tile<R, S>(data<T>(d_out) + chunk.value_at(args) + slice, args.value_heads * args.value_size, chunk.rows,
                      width, step.dy);
    }
    if (threadIdx.x < 3 * R / 4) {
      const float* factors = chunk.scratch<float>(args.factors, 3 * R);
      __pipeline_memcpy_async(step.factors + threadIdx.x * 4, factors + threadIdx.x * 4, 16);
    }
    __pipeline_commit();
  };
  start_copy(0);
  const int64_t at = item * args.key_size * args.value_size + slice;
  BlockProduct<T, P, S> state;
  if (from.data != nullptr) {
    state.each([&](int r, int c, int, float(&pair)[2]) {
      if (r < args.key_size && c < width) load_pack<2>(data<float>(from) + at + r * args.value_size + c, pair);
    });
  }
  for (int64_t number = 0; number < chunks; ++number) {
    typename Shared::Step& step = s.steps[number % 2];
    const Chunk chunk = chunk_of(number);
    state.store(s.state, kLdS);
    state.store(chunk.scratch<T>(state_scratch, P * P) + slice, P);
    __pipeline_wait_prior(0);
    __syncthreads();
    start_copy(number + 1);  // where all have read the step before this one
    BlockProduct<T, R, S> change;
    change.template add<false, false, P>(kBack ? step.k : step.w, kLd, s.state, kLdS);
    T* to_u = chunk.scratch<T>(u_scratch, R * P) + slice;
    change.each([&](int r, int c, int, const float(&pair)[2]) {
      const float factor = step.factors[r];
      float u[2];
      load_pack<2>(step.u + r * kLdS + c, u);
      for (int i = 0; i < 2; ++i) u[i] += kBack ? factor * pair[i] : -pair[i];
      store_pack<2>(to_u + r * P + c, u);
      for (float& value : u) value *= kBack ? -1.0f : factor;
      store_pack<2>(step.u + r * kLdS + c, u);
      if constexpr (kBack) {
        float dy[2];
        load_pack<2>(step.dy + r * kLdS + c, dy);
        for (float& value : dy) value *= step.factors[R + r];
        store_pack<2>(step.dy + r * kLdS + c, dy);
      }
    });
    __syncthreads();
    state.scale_rows(step.factors[3 * R - 1], step.factors[3 * R - 1]);
    state.template add<true, false, R>(kBack ? step.w : step.k, kLd, step.u, kLdS);
    if constexpr (kBack) state.template add<true, false, R>(step.q, kLd, step.dy, kLdS);
  }
  if (last.data != nullptr) state.store(data<float>(last) + at, args.value_size, args.key_size, width);
}

template <typename T, int P, bool kBack>
struct ReadShared {
  static constexpr int R = kRows<T>, kTile = R * padded<T>(P);
  alignas(128) T q[kTile], k[kTile], x[kTile], scores[R * padded<T>(R)], state[kBack ? 1 : P * padded<T>(P)];
  Gates<R> gates;
  float inverse_length[R];
};

// With the decayed scores P = q kᵀ: `rows` (out) = e^G q S + P u forward; d_u = Pᵀ `rows` (d_out) back.
template <typename T, int P, bool kBack>
__global__ __launch_bounds__(kProductThreads) void read(const __grid_constant__ Args args, View rows) {
  constexpr int R = kRows<T>, kLd = padded<T>(P), kLdR = padded<T>(R);
  auto& s = shared_memory<ReadShared<T, P, kBack>>();
  const Chunk chunk = Chunk::at_place(args, blockIdx.x / args.value_heads, blockIdx.x % args.value_heads, R);
  if (chunk.rows <= 0) return;
  const int64_t stride = args.value_heads * args.value_size;
  T* at_rows = data<T>(rows) + chunk.value_at(args);
  copy_tile<R, P>(chunk.query<T>(args), args.q_stride, chunk.rows, args.key_size, s.q);
  copy_tile<R, P>(chunk.key<T>(args), args.k_stride, chunk.rows, args.key_size, s.k);
  if constexpr (kBack) {
    copy_tile<R, P>(at_rows, stride, chunk.rows, args.value_size, s.x);
  } else {
    copy_tile<R, P>(chunk.scratch<T>(args.u, R * P), P, R, P, s.x);
    copy_tile<P, P>(chunk.scratch<T>(args.states, P * P), P, P, P, s.state);
  }
  s.gates.load(args, chunk);
  wait_for_tiles();
  const float scale = rsqrtf(static_cast<float>(args.key_size));
  scale_to_length<T, P>(s.k, 1.0f, s.inverse_length);
  scale_to_length<T, P>(s.q, scale, s.inverse_length);  // by the same threads: q's remains
  __syncthreads();
  BlockProduct<T, R, R> products;
  products.template add<false, true, P>(s.q, kLd, s.k, kLd);
  products.each([&](int r, int c, int, float(&pair)[2]) {
    for (int i = 0; i < 2; ++i) pair[i] *= s.gates.decay(r, c + i);
  });
  products.store(s.scores, kLdR);
  __syncthreads();
  BlockProduct<T, R, P> sums;
  if constexpr (kBack) {
    sums.template add<true, false, R>(s.scores, kLdR, s.x, kLd);
    sums.store(chunk.scratch<T>(args.d_u, R * P), P);
    if (threadIdx.x >= R) return;
    chunk.scratch<float>(args.factors, 3 * R)[R + threadIdx.x] =
        s.gates.entry[threadIdx.x] * s.inverse_length[threadIdx.x] * scale;
  } else {
    sums.template add<false, false, P>(s.q, kLd, s.state, kLd);
    sums.scale_rows(s.gates.entry[sums.row()], s.gates.entry[sums.row() + 8]);
    sums.template add<false, false, R>(s.scores, kLdR, s.x, kLd);
    sums.store(at_rows, stride, chunk.rows, args.value_size);
  }
}

template <typename T, int P>
struct GradientShared {
  static constexpr int R = kRows<T>, kTile = R * padded<T>(P), kSquare = R * padded<T>(R);
  alignas(128) T q[kTile], k[kTile], dy[kTile], u[kTile], z[kTile], scores[kSquare], a[kSquare], a_beta[kSquare];
  alignas(128) T state[P * padded<T>(P)], d_state[P * padded<T>(P)];
  Gates<R> gates;
  float inverse_q[R], inverse_k[R], warp_sums[kProductThreads / 32];
  using Parts = float[128 / R][R];  // of values of rows, by the warps that share these
  Parts enters, leaves, d_beta, of_pairs;
  float between[R / 16][R];
};

// Takes the sums of pairs (row i, column j < i) to those of each row's pairs up to a column, 0 from the diagonal on.
// of_rows: write_parts of the pairs.
template <typename T, int R>
__device__ void accumulate_pairs(BlockProduct<T, R, R>& pairs, const float (*of_rows)[R]) {
  float before[2] = {};
  for (int i = 0; i < pairs.first_column() / 8 / pairs.kTiles; ++i) {
    for (int half = 0; half < 2; ++half) before[half] += of_rows[i][pairs.row() + half * 8];
  }
  const int lane = threadIdx.x % 4;
  pairs.each([&](int r, int c, int half, float(&pair)[2]) {
    const float own = pair[0] + pair[1];
    float left = 0;  // never a difference: pairs near the diagonal may be far larger than those before them
    for (int step = 1; step < 4; ++step) {
      const float other = __shfl_up_sync(0xffffffffu, own, step);
      if (lane >= step) left += other;
    }
    pair[0] = c < r ? before[half] + left + pair[0] : 0.0f;
    pair[1] = c + 1 < r ? before[half] + left + own : 0.0f;
    before[half] += __shfl_sync(0xffffffffu, left + own, threadIdx.x % 32 | 3);
  });
}

// Everything that a chunk's state before, gradient of the state after, u and d_u give: a block has a key head and goes
// over its value heads, as backward_cpu does.
template <typename T, int P>
__global__ __launch_bounds__(kProductThreads) void gradients(const __grid_constant__ Args args, View d_out,
                                                             const __grid_constant__ GatedDeltaRuleGradients grads) {
  constexpr int R = kRows<T>, kLd = padded<T>(P), kLdR = padded<T>(R);
  using Rows = BlockProduct<T, R, P>;
  auto& s = shared_memory<GradientShared<T, P>>();
  const int64_t group = args.value_heads / args.key_heads, stride = args.value_heads * args.value_size;
  Chunk chunk = Chunk::at_place(args, blockIdx.x / args.key_heads, blockIdx.x % args.key_heads * group, R);
  if (chunk.rows <= 0) return;
  const float scale = rsqrtf(static_cast<float>(args.key_size));
  const int row = Rows::row();
  copy_tile<R, P>(chunk.query<T>(args), args.q_stride, chunk.rows, args.key_size, s.q);
  copy_tile<R, P>(chunk.key<T>(args), args.k_stride, chunk.rows, args.key_size, s.k);
  wait_for_tiles();
  scale_to_length<T, P>(s.q, scale, s.inverse_q);
  scale_to_length<T, P>(s.k, 1.0f, s.inverse_k);
  Rows dq, dk;
  for (int64_t i = 0; i < group; ++i, ++chunk.index, ++chunk.head) {
    __syncthreads();
    copy_tile<R, P>(data<T>(d_out) + chunk.value_at(args), stride, chunk.rows, args.value_size, s.dy);
    copy_tile<R, P>(chunk.scratch<T>(args.u, R * P), P, R, P, s.u);
    copy_tile<R, P>(chunk.scratch<T>(args.d_u, R * P), P, R, P, s.z);
    copy_tile<R, R>(chunk.scratch<T>(args.inverse, R * R), R, R, R, s.a);
    copy_tile<P, P>(chunk.scratch<T>(args.states, P * P), P, P, P, s.state);
    copy_tile<P, P>(chunk.scratch<T>(args.d_states, P * P), P, P, P, s.d_state);
    s.gates.load(args, chunk);
    wait_for_tiles();
    const float beta[2] = {s.gates.beta[row], s.gates.beta[row + 8]};
    // This thread's parts. g_t is in the decay from row j to row i where j < t ≤ i, the state before the chunk being
    // the first of rows and that after it the last: its gradient is the sum of those pairs' own. (As a sum of rows less
    // one of columns it would drown in what these have in common, where the decay is strong.)
    float enters[2] = {}, leaves[2] = {}, of_pairs[2] = {}, d_beta[2] = {};
    Rows z;  // (I + A)⁻ᵀ d_u, the gradient of β (V − e^G K S)
    z.template add<true, false, R>(s.a, kLdR, s.z, kLd);
    __syncthreads();
    z.store(s.z, kLd);
    z.each([&](int r, int c, int half, float(&pair)[2]) {
      if (r >= chunk.rows || c >= args.value_size) return;
      float v[2];
      load_pack<2>(chunk.value<T>(args) + r * args.v_stride + c, v);
      d_beta[half] += pair[0] * v[0] + pair[1] * v[1];
    });
    z.scale_rows(beta[0], beta[1]);
    z.store(data<T>(grads.v) + chunk.value_at(args), stride, chunk.rows, args.value_size);
    BlockProduct<T, R, R> scores, a;  // their gradients; that of A without its β
    BlockProduct<T, R, R> pairs, pairs_of_a;
    scores.template add<false, true, P>(s.dy, kLd, s.u, kLd);
    scores.each([&](int r, int c, int, float(&pair)[2]) {
      for (int j = 0; j < 2; ++j) pair[j] *= s.gates.decay(r, c + j);
    });
    scores.store(s.scores, kLdR);
    pairs.template add<false, true, P>(s.q, kLd, s.k, kLd);
    pairs.multiply_by(scores);
    __syncthreads();
    a.template add<false, true, P>(s.z, kLd, s.u, kLd);
    a.each([&](int r, int c, int, float(&pair)[2]) {
      for (int j = 0; j < 2; ++j) pair[j] *= -s.gates.decay(r, c + j, true);
    });
    a.store(s.a, kLdR);
    pairs_of_a.template add<false, true, P>(s.k, kLd, s.k, kLd);
    pairs_of_a.multiply_by(a);
    pairs_of_a.each([&](int, int, int half, const float(&pair)[2]) { d_beta[half] += pair[0] + pair[1]; });
    pairs.add_rows(pairs_of_a, beta[0], beta[1]);
    pairs.each([&](int r, int c, int half, float(&pair)[2]) {
      for (int j = 0; j < 2; ++j) of_pairs[half] += pair[j] = c + j < r ? pair[j] : 0.0f;
    });
    pairs.write_parts(of_pairs, s.of_pairs);
    a.scale_rows(beta[0], beta[1]);
    a.store(s.a_beta, kLdR);
    __syncthreads();
    accumulate_pairs<T, R>(pairs, s.of_pairs);
    pairs.write_column_parts(s.between);
    Rows query;
    query.template add<false, true, P>(s.dy, kLd, s.state, kLd);
    query.scale_rows(s.gates.entry[row], s.gates.entry[row + 8]);
    query.dot_rows(s.q, kLd, enters);
    query.template add<false, false, R>(s.scores, kLdR, s.k, kLd);
    dq.add_rows(query, 1.0f, 1.0f);
    Rows reader;  // k as a row of A and of e^G K S, without β
    float dots[2] = {};
    reader.template add<false, true, P>(s.z, kLd, s.state, kLd);
    reader.scale_rows(-s.gates.entry[row], -s.gates.entry[row + 8]);
    reader.dot_rows(s.k, kLd, dots);
    reader.template add<false, false, R>(s.a, kLdR, s.k, kLd);
    for (int half = 0; half < 2; ++half) {
      d_beta[half] += dots[half];
      enters[half] += beta[half] * dots[half];
    }
    Rows::write_parts(enters, s.enters);  // at once: the rest is short of registers
    Rows::write_parts(d_beta, s.d_beta);
    dk.add_rows(reader, beta[0], beta[1]);
    Rows source;  // k as a source of what the state and later rows read
    source.template add<false, true, P>(s.u, kLd, s.d_state, kLd);
    source.scale_rows(s.gates.to_end[row], s.gates.to_end[row + 8]);
    source.dot_rows(s.k, kLd, leaves);
    Rows::write_parts(leaves, s.leaves);
    source.template add<true, false, R>(s.scores, kLdR, s.q, kLd);
    source.template add<true, false, R>(s.a_beta, kLdR, s.k, kLd);
    dk.add_rows(source, 1.0f, 1.0f);
    float passes = 0;
    for (int e = threadIdx.x; e < P * P / 2; e += kProductThreads) {
      float before[2], after[2];
      load_pack<2>(s.state + e / (P / 2) * kLd + e % (P / 2) * 2, before);
      load_pack<2>(s.d_state + e / (P / 2) * kLd + e % (P / 2) * 2, after);
      passes += before[0] * after[0] + before[1] * after[1];
    }
    passes = s.gates.entry[R - 1] * block_sum(passes, s.warp_sums);  // with a barrier
    if (threadIdx.x >= 32) continue;
    constexpr int kOwn = R / 32;
    const int lane = threadIdx.x;
    float entered[kOwn], left[kOwn], later = 0, earlier = 0;  // this lane's; below, other lanes'
    for (int j = kOwn - 1; j >= 0; --j) entered[j] = later += Rows::add_parts(s.enters, lane * kOwn + j);
    for (int j = 0; j < kOwn; earlier += Rows::add_parts(s.leaves, lane * kOwn + j++)) left[j] = earlier;
    later = __shfl_down_sync(0xffffffffu, later, 1), earlier = __shfl_up_sync(0xffffffffu, earlier, 1);
    if (lane == 31) later = 0;
    if (lane == 0) earlier = 0;
    for (int step = 1; step < 32; step *= 2) {
      const float below = __shfl_down_sync(0xffffffffu, later, step),
                  above = __shfl_up_sync(0xffffffffu, earlier, step);
      if (lane + step < 32) later += below;
      if (lane >= step) earlier += above;
    }
    for (int j = 0; j < kOwn; ++j) {
      const int r = lane * kOwn + j;
      if (r >= chunk.rows) continue;
      float sum = entered[j] + later + left[j] + earlier + passes;
      for (int i = 0; i < R / 16 && r > 0; ++i) sum += s.between[i][r - 1];
      data<float>(grads.g)[chunk.gate_at(args, r)] = sum;
      data<float>(grads.beta)[chunk.gate_at(args, r)] = Rows::add_parts(s.d_beta, r);
    }
  }
  // Through the scaling to length: d = (d_unit − unit (unit · d_unit)) / length.
  float dot_q[2] = {}, dot_k[2] = {};
  dq.dot_rows(s.q, kLd, dot_q);
  dk.dot_rows(s.k, kLd, dot_k);
  __syncthreads();
  Rows::write_parts(dot_q, s.enters);
  Rows::write_parts(dot_k, s.d_beta);
  __syncthreads();
  const int64_t at = (chunk.first * args.key_heads + chunk.key_head) * args.key_size;
  const auto finish = [&](Rows& d, const T* tile, const float(*parts)[R], const float* inverse, float length) {
    d.each([&](int r, int c, int, float(&pair)[2]) {
      float unit[2];
      load_pack<2>(tile + r * kLd + c, unit);
      const float along = Rows::add_parts(parts, r) / length;
      for (int j = 0; j < 2; ++j) pair[j] = inverse[r] * (length * pair[j] - unit[j] * along);
    });
  };
  finish(dq, s.q, s.enters, s.inverse_q, scale);
  finish(dk, s.k, s.d_beta, s.inverse_k, 1.0f);
  dq.store(data<T>(grads.q) + at, args.key_heads * args.key_size, chunk.rows, args.key_size);
  dk.store(data<T>(grads.k) + at, args.key_heads * args.key_size, chunk.rows, args.key_size);
}

// Calls launch<T, P>().
template <typename Launch>
void launch_sized(const Args& args, const Launch& launch) {
  launch_typed(args.q.bf16, [&]<typename T>() {
    gated_delta_rule_chunks(args).size == 64 ? launch.template operator()<T, 64>()
                                             : launch.template operator()<T, 128>();
  });
}

template <typename T, int P, bool kBack>
void launch_walk(const Args& args, View d_out, View from, View last) {
  launch_with<WalkShared<T, P, kBack>>(walk<T, P, kBack>, args.segments * args.value_heads * (P / kSlice), args, d_out,
                                       from, last);
}

}  // namespace

void gated_delta_rule_forward_cuda(const Args& args, View out, View state) {
  const int64_t blocks = gated_delta_rule_chunks(args).places * args.value_heads;
  launch_sized(args, [&]<typename T, int P>() {
    launch_with<PrepareShared<T, P>>(prepare<T, P>, blocks, args);
    launch_walk<T, P, false>(args, {}, args.initial, state);
    launch_with<ReadShared<T, P, false>>(read<T, P, false>, blocks, args, out);
  });
}

void gated_delta_rule_backward_cuda(const Args& args, View d_out, View d_state, const GatedDeltaRuleGradients& grads) {
  const int64_t places = gated_delta_rule_chunks(args).places, blocks = places * args.value_heads;
  launch_sized(args, [&]<typename T, int P>() {
    launch_with<PrepareShared<T, P>>(prepare<T, P>, blocks, args);
    launch_walk<T, P, false>(args, {}, args.initial, {});
    launch_with<ReadShared<T, P, true>>(read<T, P, true>, blocks, args, d_out);
    launch_walk<T, P, true>(args, d_out, d_state, grads.initial);
    launch_with<GradientShared<T, P>>(gradients<T, P>, places * args.key_heads, args, d_out, grads);
  });
}

}  // namespace marrow
