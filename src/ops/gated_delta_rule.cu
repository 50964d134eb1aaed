// Chunks of rows (section 3.3 of the paper), with the names of gated_delta_rule.cpp: U = (I + A)⁻¹ β (V − e^G K S) is
// u − W S. What needs no state is done for all chunks at once (prepare, read, gradients); a walk over the chunks of a
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

  Chunk() = default;
  // Of block `index`; no rows where the place is unused.
  __device__ Chunk(const Args& args, int64_t index, int chunk_rows) : index(index), head(index % args.value_heads) {
    const int32_t* starts = data<int32_t>(args.starts);
    const int64_t place = index / args.value_heads;
    int64_t segment = 0;
    for (int64_t end = args.segments; end - segment > 1;) {
      const int64_t middle = (segment + end) / 2;
      (first_place(args, middle, chunk_rows) <= place ? segment : end) = middle;
    }
    first = starts[segment] + (place - first_place(args, segment, chunk_rows)) * chunk_rows;
    rows = min(static_cast<int64_t>(chunk_rows), starts[segment + 1] - first);
    key_head = head / (args.value_heads / args.key_heads);
  }
  template <typename T>
  __device__ const T* query(const Args& args) const {
    return data<T>(args.q) + first * args.q_stride + key_head * args.key_size;
  }
  template <typename T>
  __device__ const T* key(const Args& args) const {
    return data<T>(args.k) + first * args.k_stride + key_head * args.key_size;
  }
  // Of a dense [T, Hv, Dv].
  __device__ int64_t value_at(const Args& args) const { return (first * args.value_heads + head) * args.value_size; }
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
      const int64_t at = (chunk.first + row) * args.value_heads + chunk.head;
      const bool exists = row < chunk.rows;
      total += exists ? data<float>(args.g)[at] : 0.0f;
      beta[row] = exists ? data<float>(args.beta)[at] : 0.0f;
      own[j] = total;
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
  __device__ float decay(int i, int j) const { return __expf(static_cast<float>(sum[i] - sum[j])); }
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

// Every row of a tile times factor(row).
template <typename T, int N, typename Factor>
__device__ void scale_rows(T* tile, const Factor& factor) {
  for_packs<kRows<T>, N>([&](int, int r, int c) {
    float values[4];
    load_pack<4>(tile + r * padded<T>(N) + c, values);
    for (float& value : values) value *= factor(r);
    store_pack<4>(tile + r * padded<T>(N) + c, values);
  });
}

// t = (I + a)⁻¹ for a below the diagonal: blocks of 16 on the diagonal, then row after row of blocks. All fp32, R + 4
// apart; x has room for 16 rows. Ends with a barrier.
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

// product [R, N] in shared memory → `to`, rows `stride` apart, of which those and the columns that exist.
template <int R, int N, typename T>
__device__ void write_rows(const float* product, T* to, int64_t stride, int64_t rows, int64_t width) {
  for_packs<R, N>([&](int, int r, int c) {
    if (r >= rows || c >= width) return;
    float values[4];
    load_pack<4>(product + r * (N + 4) + c, values);
    store_pack<4>(to + r * stride + c, values);
  });
}

template <typename T, int P>
struct PrepareShared {
  static constexpr int R = kRows<T>, kInvert = (2 * R + 16) * (R + 4), kProduct = R * (P + 4);
  alignas(128) T k[R * padded<T>(P)], v[R * padded<T>(P)], for_k[R * padded<T>(R)], for_v[R * padded<T>(R)];
  alignas(128) float work[kInvert > kProduct ? kInvert : kProduct];
  Gates<R> gates;
  float inverse_length[R];
};

// w = (I + A)⁻¹ β e^G K and u = (I + A)⁻¹ β V.
template <typename T, int P>
__global__ __launch_bounds__(kProductThreads) void prepare(const __grid_constant__ Args args) {
  constexpr int R = kRows<T>, kLd = padded<T>(P), kLdR = padded<T>(R);
  auto& s = shared_memory<PrepareShared<T, P>>();
  const Chunk chunk(args, blockIdx.x, R);
  if (chunk.rows <= 0) return;
  copy_tile<R, P>(chunk.key<T>(args), args.k_stride, chunk.rows, args.key_size, s.k);
  copy_tile<R, P>(data<T>(args.v) + chunk.first * args.v_stride + chunk.head * args.value_size, args.v_stride,
                  chunk.rows, args.value_size, s.v);
  s.gates.load(args, chunk);
  wait_for_tiles();
  scale_to_length<T, P>(s.k, 1.0f, s.inverse_length);
  __syncthreads();
  float *a = s.work, *t = a + R * (R + 4);
  BlockProduct<T, R, R> products;
  products.template add<false, true, P>(s.k, kLd, s.k, kLd);
  products.store(a, R + 4);
  __syncthreads();
  for (int e = threadIdx.x; e < R * R; e += kProductThreads) {
    const int i = e / R, j = e % R;
    a[i * (R + 4) + j] *= j < i ? s.gates.beta[i] * s.gates.decay(i, j) : 0.0f;
  }
  __syncthreads();
  invert<R>(a, t, t + R * (R + 4));
  T* inverse = args.inverse.data != nullptr ? chunk.scratch<T>(args.inverse, R * R) : nullptr;
  for (int e = threadIdx.x; e < R * R; e += kProductThreads) {
    const int i = e / R, j = e % R;
    const float value = t[i * (R + 4) + j], scaled = value * s.gates.beta[j];
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
  w.store(s.work, P + 4);
  __syncthreads();
  write_rows<R, P>(s.work, chunk.scratch<T>(args.w, R * P), P, R, P);
  __syncthreads();
  u.template add<false, false, R>(s.for_v, kLdR, s.v, kLd);
  u.store(s.work, P + 4);
  __syncthreads();
  write_rows<R, P>(s.work, chunk.scratch<T>(args.u, R * P), P, R, P);
}

template <int P>
constexpr int kSlice = P < 64 ? P : 64;  // columns of the state for a block that walks

template <typename T, int P, bool kBack>
struct WalkShared {
  static constexpr int R = kRows<T>, S = kSlice<P>;
  struct Step {
    alignas(128) T w[R * padded<T>(P)], k[R * padded<T>(P)], u[R * padded<T>(S)];
    alignas(128) T q[kBack ? R * padded<T>(P) : 1], dy[kBack ? R * padded<T>(S) : 1];
    alignas(128) float factors[3 * R];
  };
  Step steps[2];  // the next one is on its way
  alignas(128) T state[P * padded<T>(S)];
  alignas(128) float work[(P > R ? P : R) * (S + 4)];
};

// Forward: u −= w S, then S = e^G_end S + (e^(G_end − G) K)ᵀ u, chunk after chunk; from args.initial to `last`.
// Back: d_u += e^(G_end − G) K dS, then dS = e^G_end dS + (e^G Q)ᵀ dO − wᵀ d_u; from `from` to `last`. Each state goes
// into scratch as the chunk finds it.
template <typename T, int P, bool kBack>
__global__ __launch_bounds__(kProductThreads) void walk(const __grid_constant__ Args args, View d_out, View from,
                                                        View last) {
  constexpr int R = kRows<T>, S = kSlice<P>, kLd = padded<T>(P), kLdS = padded<T>(S);
  using Shared = WalkShared<T, P, kBack>;
  auto& s = shared_memory<Shared>();
  const int64_t slice = blockIdx.x % (P / S) * S, item = blockIdx.x / (P / S);  // item: segment and head
  const int64_t segment = item / args.value_heads, head = item % args.value_heads;
  const int32_t* starts = data<int32_t>(args.starts);
  const int64_t begin = starts[segment], tokens = starts[segment + 1] - begin, chunks = (tokens + R - 1) / R;
  const int64_t place = first_place(args, segment, R), width = args.value_size - slice;
  const View &u_scratch = kBack ? args.d_u : args.u, &state_scratch = kBack ? args.d_states : args.states;
  const auto chunk_at = [&](int64_t step) {
    const int64_t i = kBack ? chunks - 1 - step : step;
    Chunk chunk;
    chunk.index = (place + i) * args.value_heads + head;
    chunk.first = begin + i * R;
    chunk.rows = min(static_cast<int64_t>(R), tokens - i * R);
    chunk.head = head;
    chunk.key_head = head / (args.value_heads / args.key_heads);
    return chunk;
  };
  const auto start_copy = [&](int64_t number) {
    if (number < chunks) {
      typename Shared::Step& step = s.steps[number % 2];
      const Chunk chunk = chunk_at(number);
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
    }
    __pipeline_commit();
  };
  start_copy(0);
  const auto at_global = [&](int r, int c) { return (item * args.key_size + r) * args.value_size + slice + c; };
  for_packs<P, S>([&](int, int r, int c) {
    float values[4] = {};
    if (from.data != nullptr && r < args.key_size && c < width) {
      load_pack<4>(data<float>(from) + at_global(r, c), values);
    }
    store_pack<4>(s.work + r * (S + 4) + c, values);
  });
  __syncthreads();
  BlockProduct<T, P, S> state;
  state.load(s.work, S + 4);
  for (int64_t number = 0; number < chunks; ++number) {
    typename Shared::Step& step = s.steps[number % 2];
    const Chunk chunk = chunk_at(number);
    start_copy(number + 1);
    __syncthreads();  // the first time, others are still loading from `work`
    state.store(s.work, S + 4);
    __pipeline_wait_prior(1);
    __syncthreads();
    T* to_state = chunk.scratch<T>(state_scratch, P * P) + slice;
    for_packs<P, S>([&](int, int r, int c) {
      float values[4];
      load_pack<4>(s.work + r * (S + 4) + c, values);
      store_pack<4>(s.state + r * kLdS + c, values);
      store_pack<4>(to_state + r * P + c, values);
    });
    __syncthreads();
    BlockProduct<T, R, S> change;
    change.template add<false, false, P>(kBack ? step.k : step.w, kLd, s.state, kLdS);
    change.store(s.work, S + 4);
    __syncthreads();
    T* to_u = chunk.scratch<T>(u_scratch, R * P) + slice;
    for_packs<R, S>([&](int, int r, int c) {
      float u[4], by[4];
      load_pack<4>(step.u + r * kLdS + c, u);
      load_pack<4>(s.work + r * (S + 4) + c, by);
      const float factor = step.factors[r];
      for (int i = 0; i < 4; ++i) u[i] += kBack ? factor * by[i] : -by[i];
      store_pack<4>(to_u + r * P + c, u);
      for (float& value : u) value *= kBack ? -1.0f : factor;
      store_pack<4>(step.u + r * kLdS + c, u);
      if constexpr (kBack) {
        load_pack<4>(step.dy + r * kLdS + c, by);
        for (float& value : by) value *= step.factors[R + r];
        store_pack<4>(step.dy + r * kLdS + c, by);
      }
    });
    __syncthreads();
    state.scale(step.factors[3 * R - 1]);
    state.template add<true, false, R>(kBack ? step.w : step.k, kLd, step.u, kLdS);
    if constexpr (kBack) state.template add<true, false, R>(step.q, kLd, step.dy, kLdS);
    __syncthreads();
  }
  if (last.data == nullptr) return;
  __syncthreads();  // without chunks, others are still loading from `work`
  state.store(s.work, S + 4);
  __syncthreads();
  write_rows<P, S>(s.work, data<float>(last) + at_global(0, 0), args.value_size, args.key_size, width);
}

template <typename T, int P>
struct ReadShared {
  static constexpr int R = kRows<T>;
  alignas(128) T q[R * padded<T>(P)], k[R * padded<T>(P)], x[R * padded<T>(P)], scores[R * padded<T>(R)];
  alignas(128) float work[R * ((P > R ? P : R) + 4)];
  Gates<R> gates;
  float inverse_length[R];
};

// With the decayed scores P = q kᵀ: `rows` (out) = e^G q S + P u forward; d_u = Pᵀ `rows` (d_out) back.
template <typename T, int P, bool kBack>
__global__ __launch_bounds__(kProductThreads) void read(const __grid_constant__ Args args, View rows) {
  constexpr int R = kRows<T>, kLd = padded<T>(P), kLdR = padded<T>(R);
  auto& s = shared_memory<ReadShared<T, P>>();
  const Chunk chunk(args, blockIdx.x, R);
  if (chunk.rows <= 0) return;
  const int64_t stride = args.value_heads * args.value_size;
  T* at_rows = data<T>(rows) + chunk.value_at(args);
  copy_tile<R, P>(chunk.query<T>(args), args.q_stride, chunk.rows, args.key_size, s.q);
  copy_tile<R, P>(chunk.key<T>(args), args.k_stride, chunk.rows, args.key_size, s.k);
  if constexpr (kBack) {
    copy_tile<R, P>(at_rows, stride, chunk.rows, args.value_size, s.x);
  } else {
    copy_tile<R, P>(chunk.scratch<T>(args.u, R * P), P, R, P, s.x);
  }
  s.gates.load(args, chunk);
  wait_for_tiles();
  const float scale = rsqrtf(static_cast<float>(args.key_size));
  scale_to_length<T, P>(s.k, 1.0f, s.inverse_length);
  __syncthreads();
  scale_to_length<T, P>(s.q, scale, s.inverse_length);
  __syncthreads();
  BlockProduct<T, R, R> products;
  products.template add<false, true, P>(s.q, kLd, s.k, kLd);
  products.store(s.work, R + 4);
  __syncthreads();
  for (int e = threadIdx.x; e < R * R; e += kProductThreads) {
    const int i = e / R, j = e % R;
    s.scores[i * kLdR + j] = static_cast<T>(j <= i ? s.work[i * (R + 4) + j] * s.gates.decay(i, j) : 0.0f);
  }
  if constexpr (kBack) {
    if (threadIdx.x < R) {
      chunk.scratch<float>(args.factors, 3 * R)[R + threadIdx.x] =
          s.gates.entry[threadIdx.x] * s.inverse_length[threadIdx.x] * scale;
    }
  } else {
    scale_rows<T, P>(s.q, [&](int r) { return s.gates.entry[r]; });
  }
  __syncthreads();
  BlockProduct<T, R, P> sums;
  if constexpr (!kBack) {
    sums.template add<false, false, P>(s.q, kLd, chunk.scratch<T>(args.states, P * P), P);
  }
  sums.template add<kBack, false, R>(s.scores, kLdR, s.x, kLd);
  sums.store(s.work, P + 4);
  __syncthreads();
  if constexpr (kBack) {
    write_rows<R, P>(s.work, chunk.scratch<T>(args.d_u, R * P), P, R, P);
  } else {
    write_rows<R, P>(s.work, at_rows, stride, chunk.rows, args.value_size);
  }
}

struct Gradients {
  View q, k, v, g, beta;
};

template <typename T, int P>
struct GradientShared {
  static constexpr int R = kRows<T>;
  alignas(128) T q[R * padded<T>(P)], k[R * padded<T>(P)], dy[R * padded<T>(P)], u[R * padded<T>(P)];
  alignas(128) T z[R * padded<T>(P)], a[R * padded<T>(R)], scores[R * padded<T>(R)];
  alignas(128) float work[R * ((P > R ? P : R) + 4)];
  Gates<R> gates;
  float inverse_q[R], inverse_k[R], d_sum[R], d_beta[R], sums[kProductWarps];
};

// Everything that a chunk's states before, gradients of the state after, u and d_u give: a block has a key head and
// goes over its value heads, as backward_cpu does.
template <typename T, int P>
__global__ __launch_bounds__(kProductThreads) void gradients(const __grid_constant__ Args args, View d_out,
                                                             Gradients grads) {
  constexpr int R = kRows<T>, kLd = padded<T>(P), kLdR = padded<T>(R), kLanes = P / 4;
  constexpr int kEach = (R * kLanes + kProductThreads - 1) / kProductThreads;
  auto& s = shared_memory<GradientShared<T, P>>();
  const int64_t group = args.value_heads / args.key_heads;
  const int64_t first_head = blockIdx.x % args.key_heads * group;
  Chunk chunk(args, blockIdx.x / args.key_heads * args.value_heads + first_head, R);
  if (chunk.rows <= 0) return;
  const float scale = rsqrtf(static_cast<float>(args.key_size));
  copy_tile<R, P>(chunk.query<T>(args), args.q_stride, chunk.rows, args.key_size, s.q);
  copy_tile<R, P>(chunk.key<T>(args), args.k_stride, chunk.rows, args.key_size, s.k);
  wait_for_tiles();
  scale_to_length<T, P>(s.q, scale, s.inverse_q);
  scale_to_length<T, P>(s.k, 1.0f, s.inverse_k);
  float dq[kEach][4] = {}, dk[kEach][4] = {};
  for (int64_t i = 0; i < group; ++i, ++chunk.index, ++chunk.head) {
    const int64_t values = chunk.value_at(args), stride = args.value_heads * args.value_size;
    const T *state = chunk.scratch<T>(args.states, P * P), *d_state = chunk.scratch<T>(args.d_states, P * P);
    __syncthreads();
    copy_tile<R, P>(data<T>(d_out) + values, stride, chunk.rows, args.value_size, s.dy);
    copy_tile<R, P>(chunk.scratch<T>(args.u, R * P), P, R, P, s.u);
    copy_tile<R, P>(chunk.scratch<T>(args.d_u, R * P), P, R, P, s.z);
    copy_tile<R, R>(chunk.scratch<T>(args.inverse, R * R), R, R, R, s.a);
    s.gates.load(args, chunk);
    wait_for_tiles();
    {  // z = (I + A)⁻ᵀ d_u, the gradient of β (V − e^G K S)
      BlockProduct<T, R, P> sums;
      sums.template add<true, false, R>(s.a, kLdR, s.z, kLd);
      sums.store(s.work, P + 4);
    }
    __syncthreads();
    for_packs<R, P>([&](int, int r, int c) {
      float z[4], v[4] = {};
      load_pack<4>(s.work + r * (P + 4) + c, z);
      store_pack<4>(s.z + r * kLd + c, z);
      const bool exists = r < chunk.rows && c < args.value_size;
      if (exists) {
        load_pack<4>(data<T>(args.v) + (chunk.first + r) * args.v_stride + chunk.head * args.value_size + c, v);
      }
      const float dot = lane_sum<kLanes>(dot4(z, v));
      if (c == 0) s.d_beta[r] = dot;
      for (float& value : z) value *= s.gates.beta[r];
      if (exists) store_pack<4>(data<T>(grads.v) + values + r * stride + c, z);
    });
    __syncthreads();
    {  // of the scores
      BlockProduct<T, R, R> sums;
      sums.template add<false, true, P>(s.dy, kLd, s.u, kLd);
      sums.store(s.work, R + 4);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < R * R; e += kProductThreads) {
      const int r = e / R, c = e % R;
      s.scores[r * kLdR + c] = static_cast<T>(c <= r ? s.work[r * (R + 4) + c] * s.gates.decay(r, c) : 0.0f);
    }
    __syncthreads();
    {  // of A / β
      BlockProduct<T, R, R> sums;
      sums.template add<false, true, P>(s.z, kLd, s.u, kLd);
      sums.store(s.work, R + 4);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < R * R; e += kProductThreads) {
      const int r = e / R, c = e % R;
      s.a[r * kLdR + c] = static_cast<T>(c < r ? -s.work[r * (R + 4) + c] * s.gates.decay(r, c) : 0.0f);
    }
    scale_rows<T, P>(s.dy, [&](int r) { return s.gates.entry[r]; });
    scale_rows<T, P>(s.z, [&](int r) { return -s.gates.entry[r]; });
    scale_rows<T, P>(s.u, [&](int r) { return s.gates.to_end[r]; });
    __syncthreads();
    {
      BlockProduct<T, R, P> sums;
      sums.template add<false, false, R>(s.scores, kLdR, s.k, kLd);
      sums.template add<false, true, P>(s.dy, kLd, state, P);
      sums.store(s.work, P + 4);
    }
    __syncthreads();
    for_packs<R, P>([&](int i, int r, int c) {
      float d[4], q[4];
      load_pack<4>(s.work + r * (P + 4) + c, d);
      load_pack<4>(s.q + r * kLd + c, q);
      const float dot = lane_sum<kLanes>(dot4(d, q));
      if (c == 0) s.d_sum[r] = dot;
      for (int j = 0; j < 4; ++j) dq[i][j] += d[j];
    });
    __syncthreads();
    {  // k as a row of A and of e^G K S, times β
      BlockProduct<T, R, P> sums;
      sums.template add<false, false, R>(s.a, kLdR, s.k, kLd);
      sums.template add<false, true, P>(s.z, kLd, state, P);
      sums.store(s.work, P + 4);
    }
    __syncthreads();
    for_packs<R, P>([&](int i, int r, int c) {
      float d[4], k[4];
      load_pack<4>(s.work + r * (P + 4) + c, d);
      load_pack<4>(s.k + r * kLd + c, k);
      const float dot = lane_sum<kLanes>(dot4(d, k)), beta = s.gates.beta[r];
      if (c == 0) {
        s.d_beta[r] += dot;
        s.d_sum[r] += beta * dot;
      }
      for (int j = 0; j < 4; ++j) dk[i][j] += beta * d[j];
    });
    scale_rows<T, R>(s.a, [&](int r) { return s.gates.beta[r]; });
    __syncthreads();
    // k as a source of what the state and later rows read; at_end: of G's sum at the end of the chunk.
    float at_end = 0;
    for (int e = threadIdx.x * 4; e < P * P; e += kProductThreads * 4) {
      float before[4], after[4];
      load_pack<4>(state + e, before);
      load_pack<4>(d_state + e, after);
      at_end += dot4(before, after);
    }
    at_end *= s.gates.entry[R - 1];
    BlockProduct<T, R, P> source;
    source.template add<false, true, P>(s.u, kLd, d_state, P);
    source.store(s.work, P + 4);
    __syncthreads();
    for_packs<R, P>([&](int, int r, int c) {
      float d[4], k[4];
      load_pack<4>(s.work + r * (P + 4) + c, d);
      load_pack<4>(s.k + r * kLd + c, k);
      at_end += dot4(d, k);
    });
    at_end = block_sum(at_end, s.sums);  // with a barrier
    source.template add<true, false, R>(s.scores, kLdR, s.q, kLd);
    source.template add<true, false, R>(s.a, kLdR, s.k, kLd);
    source.store(s.work, P + 4);
    __syncthreads();
    for_packs<R, P>([&](int i, int r, int c) {
      float d[4], k[4];
      load_pack<4>(s.work + r * (P + 4) + c, d);
      load_pack<4>(s.k + r * kLd + c, k);
      const float dot = lane_sum<kLanes>(dot4(d, k));
      if (c == 0) s.d_sum[r] -= dot;
      for (int j = 0; j < 4; ++j) dk[i][j] += d[j];
    });
    __syncthreads();
    if (threadIdx.x >= 32) continue;  // the gradient of g is that of G summed over later rows
    constexpr int kOwn = R / 32;
    float total = 0, own[kOwn];
    for (int j = kOwn - 1; j >= 0; --j) own[j] = total += s.d_sum[threadIdx.x * kOwn + j];
    float scan = total;
    for (int step = 1; step < 32; step *= 2) {
      const float after = __shfl_down_sync(0xffffffffu, scan, step);
      if (threadIdx.x + step < 32) scan += after;
    }
    for (int j = 0; j < kOwn; ++j) {
      const int r = threadIdx.x * kOwn + j;
      const int64_t at = (chunk.first + r) * args.value_heads + chunk.head;
      if (r >= chunk.rows) continue;
      data<float>(grads.g)[at] = scan - total + own[j] + at_end;
      data<float>(grads.beta)[at] = s.d_beta[r];
    }
  }
  // Through the scaling to length: d = (d_unit − unit (unit · d_unit)) / length.
  for_packs<R, P>([&](int i, int r, int c) {
    float q[4], k[4];
    load_pack<4>(s.q + r * kLd + c, q);
    load_pack<4>(s.k + r * kLd + c, k);
    const float dot_q = lane_sum<kLanes>(dot4(dq[i], q)), dot_k = lane_sum<kLanes>(dot4(dk[i], k));
    if (r >= chunk.rows || c >= args.key_size) return;
    for (int j = 0; j < 4; ++j) {
      q[j] = s.inverse_q[r] * (scale * dq[i][j] - q[j] / scale * dot_q);
      k[j] = s.inverse_k[r] * (dk[i][j] - k[j] * dot_k);
    }
    const int64_t at = ((chunk.first + r) * args.key_heads + chunk.key_head) * args.key_size + c;
    store_pack<4>(data<T>(grads.q) + at, q);
    store_pack<4>(data<T>(grads.k) + at, k);
  });
}

// Calls launch<T, P>().
template <typename Launch>
void launch_sized(const Args& args, const Launch& launch) {
  launch_typed(args.q.bf16, [&]<typename T>() {
    switch (gated_delta_rule_chunks(args).size) {
      case 32:
        return launch.template operator()<T, 32>();
      case 64:
        return launch.template operator()<T, 64>();
      default:
        return launch.template operator()<T, 128>();
    }
  });
}

template <typename T, int P, bool kBack>
void launch_walk(const Args& args, View d_out, View from, View last) {
  launch_with_memory(walk<T, P, kBack>, args.segments * args.value_heads * (P / kSlice<P>),
                     sizeof(WalkShared<T, P, kBack>), args, d_out, from, last);
}

}  // namespace

void gated_delta_rule_forward_cuda(const Args& args, View out, View state) {
  const int64_t blocks = gated_delta_rule_chunks(args).places * args.value_heads;
  launch_sized(args, [&]<typename T, int P>() {
    launch_with_memory(prepare<T, P>, blocks, sizeof(PrepareShared<T, P>), args);
    launch_walk<T, P, false>(args, {}, args.initial, state);
    launch_with_memory(read<T, P, false>, blocks, sizeof(ReadShared<T, P>), args, out);
  });
}

void gated_delta_rule_backward_cuda(const Args& args, View d_out, View d_state, View dq, View dk, View dv, View dg,
                                    View d_beta, View d_initial) {
  const int64_t places = gated_delta_rule_chunks(args).places;
  launch_sized(args, [&]<typename T, int P>() {
    launch_with_memory(prepare<T, P>, places * args.value_heads, sizeof(PrepareShared<T, P>), args);
    launch_walk<T, P, false>(args, {}, args.initial, {});
    launch_with_memory(read<T, P, true>, places * args.value_heads, sizeof(ReadShared<T, P>), args, d_out);
    launch_walk<T, P, true>(args, d_out, d_state, d_initial);
    launch_with_memory(gradients<T, P>, places * args.key_heads, sizeof(GradientShared<T, P>), args, d_out,
                       Gradients{dq, dk, dv, dg, d_beta});
  });
}

}  // namespace marrow
