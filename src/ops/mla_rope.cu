#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kThreads = 256;

// A pair turned by its angle; direction −1 turns back.
__device__ void turn(float (&x)[2], float cos, float sin, float direction) {
  const float a = x[0], b = x[1], s = direction * sin;
  x[0] = a * cos - b * s;
  x[1] = b * cos + a * s;
}

// One block a token; a thread has pairs of elements.
template <typename T>
__global__ void forward(MlaRopeArgs args, const T* q, const T* kv, const T* k_rope, T* q_out, T* k_out, T* v_out) {
  const int64_t token = blockIdx.x, n = args.nope, r = args.rope, dv = args.value, half = (n + r) / 2;
  const float* cos = args.cos + args.positions[token] * (r / 2);
  const float* sin = args.sin + args.positions[token] * (r / 2);
  for (int64_t i = threadIdx.x; i < args.heads * half; i += kThreads) {
    const int64_t head = token * args.heads + i / half, column = i % half * 2;
    float query[2], key[2];
    load_pack<2>(q + head * 2 * half + column, query);
    if (column < n) {
      load_pack<2>(kv + head * (n + dv) + column, key);
    } else {
      const int64_t angle = (column - n) / 2;
      load_pack<2>(k_rope + token * r + column - n, key);
      turn(query, cos[angle], sin[angle], 1);
      turn(key, cos[angle], sin[angle], 1);
    }
    store_pack<2>(q_out + head * 2 * half + column, query);
    store_pack<2>(k_out + head * 2 * half + column, key);
  }
  for (int64_t i = threadIdx.x; i < args.heads * dv / 2; i += kThreads) {
    const int64_t head = token * args.heads + i / (dv / 2), column = i % (dv / 2) * 2;
    float value[2];
    load_pack<2>(kv + head * (n + dv) + n + column, value);
    store_pack<2>(v_out + head * dv + column, value);
  }
}

template <typename T>
__global__ void backward(MlaRopeArgs args, const T* dq_out, const T* dk_out, const T* dv_out, T* dq, T* dkv,
                         T* dk_rope) {
  const int64_t token = blockIdx.x, n = args.nope, r = args.rope, dv = args.value, half = (n + r) / 2;
  const float* cos = args.cos + args.positions[token] * (r / 2);
  const float* sin = args.sin + args.positions[token] * (r / 2);
  for (int64_t i = threadIdx.x; i < args.heads * half; i += kThreads) {
    const int64_t head = token * args.heads + i / half, column = i % half * 2;
    float query[2], key[2];
    load_pack<2>(dq_out + head * 2 * half + column, query);
    if (column < n) {
      load_pack<2>(dk_out + head * 2 * half + column, key);
      store_pack<2>(dkv + head * (n + dv) + column, key);
    } else {
      turn(query, cos[(column - n) / 2], sin[(column - n) / 2], -1);
    }
    store_pack<2>(dq + head * 2 * half + column, query);
  }
  for (int64_t i = threadIdx.x; i < args.heads * dv / 2; i += kThreads) {
    const int64_t head = token * args.heads + i / (dv / 2), column = i % (dv / 2) * 2;
    float value[2];
    load_pack<2>(dv_out + head * dv + column, value);
    store_pack<2>(dkv + head * (n + dv) + n + column, value);
  }
  for (int64_t i = threadIdx.x; i < r / 2; i += kThreads) {
    float sum[2] = {0.0f, 0.0f}, key[2];
    for (int64_t head = token * args.heads; head < (token + 1) * args.heads; ++head) {
      load_pack<2>(dk_out + head * 2 * half + n + 2 * i, key);
      sum[0] += key[0];
      sum[1] += key[1];
    }
    turn(sum, cos[i], sin[i], -1);
    store_pack<2>(dk_rope + token * r + 2 * i, sum);
  }
}

}  // namespace

void mla_rope_forward_cuda(const MlaRopeArgs& args, View q, View kv, View k_rope, View q_out, View k_out, View v_out) {
  launch_typed(q.bf16, [&]<typename T>() {
    forward<T><<<blocks_for(q.rows, 1), kThreads, 0, current_stream()>>>(args, q, kv, k_rope, q_out, k_out, v_out);
  });
}

void mla_rope_backward_cuda(const MlaRopeArgs& args, View dq_out, View dk_out, View dv_out, View dq, View dkv,
                            View dk_rope) {
  launch_typed(dq.bf16, [&]<typename T>() {
    backward<T>
        <<<blocks_for(dq.rows, 1), kThreads, 0, current_stream()>>>(args, dq_out, dk_out, dv_out, dq, dkv, dk_rope);
  });
}

}  // namespace marrow
