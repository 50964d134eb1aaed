#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

// 16 lanes work on a head: each has kPairs elements of the first half and their partners in the
// second, side by side where kPacked, else 16 apart (odd sizes). A warp takes a token's q and k
// heads two by two, so that cos, sin and the norm weights stay in its registers.
constexpr int kLanes = 16;
constexpr int kWarps = 4;

template <typename T, int kPairs, bool kPacked>
struct Lane {
  int64_t half;
  int lane;  // in its group of 16

  __device__ int64_t index(int pair) const { return kPacked ? lane * kPairs + pair : lane + kLanes * pair; }
  template <typename Source>
  __device__ void load(const Source* from, float (&to)[kPairs]) const {
    if constexpr (kPacked) {
      load_pack<kPairs>(from + lane * kPairs, to);
    } else {
      for (int i = 0; i < kPairs; ++i) to[i] = index(i) < half ? static_cast<float>(from[index(i)]) : 0.0f;
    }
  }
  __device__ void store(T* to, const float (&from)[kPairs]) const {
    if constexpr (kPacked) {
      store_pack<kPairs>(to + lane * kPairs, from);
    } else {
      for (int i = 0; i < kPairs; ++i) {
        if (index(i) < half) to[index(i)] = static_cast<T>(from[i]);
      }
    }
  }
};

// The two norm weights (q's, k's), cos and sin that a lane needs for a token.
template <int kPairs>
struct Factors {
  float first[2][kPairs], second[2][kPairs], cos[kPairs], sin[kPairs];
};

template <typename T, int kPairs, bool kPacked>
__device__ __forceinline__ void load_norms(const QkNormRopeArgs& args, const Lane<T, kPairs, kPacked>& lane,
                                           Factors<kPairs>& factors) {
  const T* norms[2] = {static_cast<const T*>(args.q_norm.data), static_cast<const T*>(args.k_norm.data)};
  for (int n = 0; n < 2; ++n) {
    lane.load(norms[n], factors.first[n]);
    lane.load(norms[n] + lane.half, factors.second[n]);
  }
}

template <typename T, int kPairs, bool kPacked>
__global__ void __launch_bounds__(32 * kWarps) forward_kernel(const __grid_constant__ QkNormRopeArgs args, T* q, T* k) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (token >= args.qkv.rows) return;
  const int64_t size = args.head_size;
  const Lane<T, kPairs, kPacked> lane{size / 2, static_cast<int>(threadIdx.x) % kLanes};
  Factors<kPairs> factors;
  load_norms<T, kPairs, kPacked>(args, lane, factors);
  lane.load(args.cos + args.positions[token] * lane.half, factors.cos);
  lane.load(args.sin + args.positions[token] * lane.half, factors.sin);
  const int64_t heads = args.q_heads + args.kv_heads;
  const T* row = static_cast<const T*>(args.qkv.data) + token * (heads + args.kv_heads) * size;
#pragma unroll 2
  for (int64_t h = threadIdx.x / kLanes; h < (heads + 1) / 2 * 2; h += 2) {
    const bool valid = h < heads;  // all lanes take part in the sum
    const int64_t head = valid ? h : heads - 1;
    float a[kPairs], b[kPairs];
    lane.load(row + head * size, a);
    lane.load(row + head * size + lane.half, b);
    float squares = 0;
    for (int i = 0; i < kPairs; ++i) squares += a[i] * a[i] + b[i] * b[i];
    squares = lane_sum<kLanes>(squares);
    const float scale = 1.0f / sqrtf(squares / static_cast<float>(size) + args.eps);
    const bool is_q = head < args.q_heads;
    for (int i = 0; i < kPairs; ++i) {
      const float x = a[i] * scale * (is_q ? factors.first[0][i] : factors.first[1][i]);
      const float y = b[i] * scale * (is_q ? factors.second[0][i] : factors.second[1][i]);
      a[i] = x * factors.cos[i] - y * factors.sin[i];
      b[i] = y * factors.cos[i] + x * factors.sin[i];
    }
    if (!valid) continue;
    T* out = is_q ? q + (token * args.q_heads + head) * size : k + (token * args.kv_heads + head - args.q_heads) * size;
    lane.store(out, a);
    lane.store(out + lane.half, b);
  }
}

template <typename T, int kPairs, bool kPacked>
__global__ void __launch_bounds__(32 * kWarps) backward_kernel(const __grid_constant__ QkNormRopeArgs args, const T* dq,
                                                               const T* dk, const T* dv, T* d_qkv, float* partials) {
  const int64_t size = args.head_size;
  const Lane<T, kPairs, kPacked> lane{size / 2, static_cast<int>(threadIdx.x) % kLanes};
  Factors<kPairs> factors;
  load_norms<T, kPairs, kPacked>(args, lane, factors);
  float d_first[2][kPairs] = {}, d_second[2][kPairs] = {};
  const int64_t heads = args.q_heads + args.kv_heads;
  const int64_t group = threadIdx.x / kLanes;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y; token < args.qkv.rows;
       token += static_cast<int64_t>(gridDim.x) * kWarps) {
    lane.load(args.cos + args.positions[token] * lane.half, factors.cos);
    lane.load(args.sin + args.positions[token] * lane.half, factors.sin);
    const int64_t start = token * (heads + args.kv_heads) * size;
    const T* row = static_cast<const T*>(args.qkv.data) + start;
    T* d_row = d_qkv + start;
#pragma unroll 2
    for (int64_t h = group; h < (heads + 1) / 2 * 2; h += 2) {
      const bool valid = h < heads;
      const int64_t head = valid ? h : heads - 1;
      const bool is_q = head < args.q_heads;
      const T* d_head =
          is_q ? dq + (token * args.q_heads + head) * size : dk + (token * args.kv_heads + head - args.q_heads) * size;
      float a[kPairs], b[kPairs], da[kPairs], db[kPairs];
      lane.load(row + head * size, a);
      lane.load(row + head * size + lane.half, b);
      lane.load(d_head, da);
      lane.load(d_head + lane.half, db);
      float squares = 0, dot = 0;
      for (int i = 0; i < kPairs; ++i) {
        const float x = da[i] * factors.cos[i] + db[i] * factors.sin[i];
        const float y = db[i] * factors.cos[i] - da[i] * factors.sin[i];
        da[i] = x;
        db[i] = y;
        squares += a[i] * a[i] + b[i] * b[i];
        dot += x * (is_q ? factors.first[0][i] : factors.first[1][i]) * a[i] +
               y * (is_q ? factors.second[0][i] : factors.second[1][i]) * b[i];
      }
      squares = lane_sum<kLanes>(squares);
      dot = lane_sum<kLanes>(dot);
      const float scale = 1.0f / sqrtf(squares / static_cast<float>(size) + args.eps);
      const float shift = dot * scale * scale / static_cast<float>(size);
      if (!valid) continue;
      for (int i = 0; i < kPairs; ++i) {
        const float first = da[i] * a[i] * scale;
        const float second = db[i] * b[i] * scale;
        d_first[0][i] += is_q ? first : 0.0f;
        d_first[1][i] += is_q ? 0.0f : first;
        d_second[0][i] += is_q ? second : 0.0f;
        d_second[1][i] += is_q ? 0.0f : second;
        a[i] = scale * (da[i] * (is_q ? factors.first[0][i] : factors.first[1][i]) - a[i] * shift);
        b[i] = scale * (db[i] * (is_q ? factors.second[0][i] : factors.second[1][i]) - b[i] * shift);
      }
      lane.store(d_row + head * size, a);
      lane.store(d_row + head * size + lane.half, b);
    }
    for (int64_t h = group; h < args.kv_heads; h += 2) {
      const T* from = dv + (token * args.kv_heads + h) * size;
      float a[kPairs];
      lane.load(from, a);
      lane.store(d_row + (heads + h) * size, a);
      lane.load(from + lane.half, a);
      lane.store(d_row + (heads + h) * size + lane.half, a);
    }
  }
  // The block's sum, in a fixed order: its 2·kWarps groups one after the other.
  extern __shared__ float sums[];  // [2D]
  for (int turn = 0; turn < 2 * kWarps; ++turn) {
    if (turn == static_cast<int>(threadIdx.y * 2 + group)) {
      for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < kPairs; ++i) {
          if (lane.index(i) >= lane.half) continue;
          float* first = sums + n * size + lane.index(i);
          float* second = first + lane.half;
          *first = (turn == 0 ? 0.0f : *first) + d_first[n][i];
          *second = (turn == 0 ? 0.0f : *second) + d_second[n][i];
        }
      }
    }
    __syncthreads();
  }
  for (int64_t c = threadIdx.y * 32 + threadIdx.x; c < 2 * size; c += 32 * kWarps) {
    partials[blockIdx.x * 2 * size + c] = sums[c];
  }
}

// Calls launch<T, kPairs, kPacked>() for the head size; `packed` where all is aligned to 16 bytes.
template <typename T, typename Launch>
void dispatch(int64_t head_size, bool packed, const Launch& launch) {
  if (packed && head_size == 64) return launch.template operator()<T, 2, true>();
  if (packed && head_size == 128) return launch.template operator()<T, 4, true>();
  if (packed && head_size == 256) return launch.template operator()<T, 8, true>();
  if (head_size <= 128) return launch.template operator()<T, 4, false>();
  return launch.template operator()<T, 16, false>();
}

template <typename Launch, typename... Views>
void dispatch(const QkNormRopeArgs& args, const Launch& launch, const Views&... views) {
  const bool packed = aligned_to(args.qkv.data, 16) && aligned_to(args.q_norm.data, 16) &&
                      aligned_to(args.k_norm.data, 16) && aligned_to(args.cos, 16) && aligned_to(args.sin, 16) &&
                      (aligned_to(views.data, 16) && ...);
  if (args.qkv.bf16) {
    dispatch<bf16>(args.head_size, packed, launch);
  } else {
    dispatch<float>(args.head_size, packed, launch);
  }
  MARROW_CUDA_CHECK(cudaGetLastError());
}

// A block a token; a thread turns packs of pairs (c, c + half), backward those of dq and dk by the negative angle.
template <typename T, int kWidth, bool kBackward>
__global__ void rotate_kernel(const __grid_constant__ QkNormRopeArgs args, T* q, T* k, const T* dv) {
  const int64_t token = blockIdx.x, size = args.head_size, half = size / 2, packs = half / kWidth;
  const int64_t heads = args.q_heads + args.kv_heads;
  T* row = static_cast<T*>(args.qkv.data) + token * (heads + args.kv_heads) * size;
  for (int64_t i = threadIdx.x; i < heads * packs; i += blockDim.x) {
    const int64_t head = i / packs, c = i % packs * kWidth;
    T* wide = row + head * size + c;
    T* own = c + (head < args.q_heads ? q + (token * args.q_heads + head) * size
                                      : k + (token * args.kv_heads + head - args.q_heads) * size);
    const T* from = kBackward ? own : wide;
    T* to = kBackward ? wide : own;
    float a[kWidth], b[kWidth], cos[kWidth], sin[kWidth];
    load_pack<kWidth>(from, a);
    load_pack<kWidth>(from + half, b);
    load_pack<kWidth>(args.cos + args.positions[token] * half + c, cos);
    load_pack<kWidth>(args.sin + args.positions[token] * half + c, sin);
    for (int j = 0; j < kWidth; ++j) {
      const float x = a[j], y = b[j], s = kBackward ? -sin[j] : sin[j];
      a[j] = x * cos[j] - y * s;
      b[j] = y * cos[j] + x * s;
    }
    store_pack<kWidth>(to, a);
    store_pack<kWidth>(to + half, b);
  }
  if constexpr (kBackward) {
    for (int64_t i = threadIdx.x * kWidth; i < args.kv_heads * size; i += blockDim.x * kWidth) {
      float value[kWidth];
      load_pack<kWidth>(dv + token * args.kv_heads * size + i, value);
      store_pack<kWidth>(row + heads * size + i, value);
    }
  }
}

template <bool kBackward>
void rotate(const QkNormRopeArgs& args, View q, View k, View dv) {
  const bool packs =
      in_packs(args.head_size / 2, args.qkv, q, k, dv) && aligned_to(args.cos, 16) && aligned_to(args.sin, 16);
  launch_packs(args.qkv.bf16, packs, [&]<typename T, int kWidth>() {
    rotate_kernel<T, kWidth, kBackward><<<blocks_for(args.qkv.rows, 1), 256, 0, current_stream()>>>(args, q, k, dv);
  });
}

}  // namespace

void qk_norm_rope_forward_cuda(const QkNormRopeArgs& args, View q, View k) {
  const auto launch = [&]<typename T, int kPairs, bool kPacked>() {
    forward_kernel<T, kPairs, kPacked>
        <<<blocks_for(args.qkv.rows, kWarps), dim3(32, kWarps), 0, current_stream()>>>(args, q, k);
  };
  dispatch(args, launch, q, k);
}

void qk_norm_rope_backward_cuda(const QkNormRopeArgs& args, View dq, View dk, View dv, View d_qkv, View partials,
                                View q_norm_grad, View k_norm_grad) {
  const int64_t size = args.head_size;
  const auto launch = [&]<typename T, int kPairs, bool kPacked>() {
    backward_kernel<T, kPairs, kPacked>
        <<<partials.rows, dim3(32, kWarps), 2 * size * sizeof(float), current_stream()>>>(args, dq, dk, dv, d_qkv,
                                                                                          partials);
  };
  dispatch(args, launch, dq, dk, dv, d_qkv);
  const float* sums = partials;
  if (q_norm_grad.defined()) {
    launch_add_column_sums(sums, partials.rows, 2 * size, size, q_norm_grad);
  }
  if (k_norm_grad.defined()) {
    launch_add_column_sums(sums + size, partials.rows, 2 * size, size, k_norm_grad);
  }
}

void split_and_rotate_forward_cuda(const QkNormRopeArgs& args, View q, View k) { rotate<false>(args, q, k, {}); }

void split_and_rotate_backward_cuda(const QkNormRopeArgs& args, View dq, View dk, View dv) {
  rotate<true>(args, dq, dk, dv);
}

}  // namespace marrow
