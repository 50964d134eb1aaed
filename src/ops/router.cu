#include <algorithm>
#include <climits>

#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr unsigned kAll = ~0u;

__device__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

// An integer that orders as the float does; never 0, which marks what was taken.
__device__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return max(1u, bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u));
}

int64_t tokens_per_warp(const RouterShape& shape) { return std::clamp<int64_t>(shape.tokens / (528 * kWarps), 1, 64); }

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// What ordered() was given.
__device__ float unordered(unsigned key) { return __uint_as_float((key >> 31) != 0 ? key ^ 0x80000000u : ~key); }

// Bit g: experts of group g may be chosen. keys: what each expert of the lane is chosen by.
template <int kPerLane>
__device__ unsigned best_groups(const RouterShape& shape, const unsigned (&keys)[kPerLane], int lane) {
  const int groups = static_cast<int>(shape.expert_groups), size = static_cast<int>(shape.experts) / groups;
  unsigned mine = 0;  // lane g: how good group g is
  for (int group = 0; group < groups; ++group) {
    float best = -INFINITY, second = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int place = i * 32 + lane - group * size;
      if (place < 0 || place >= size) continue;
      const float choice = unordered(keys[i]);
      second = fmaxf(second, fminf(best, choice));
      best = fmaxf(best, choice);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(kAll, best, step);
      second = fmaxf(fmaxf(second, __shfl_xor_sync(kAll, second, step)), fminf(best, other));
      best = fmaxf(best, other);
    }
    if (lane == group) mine = ordered(shape.sigmoid ? best + second : best);
  }
  int better = 0;
  for (int group = 0; group < groups; ++group) {
    const unsigned other = __shfl_sync(kAll, mine, group);
    better += other > mine || (other == mine && group < lane);
  }
  return __ballot_sync(kAll, lane < groups && better < shape.top_groups);
}

// One warp a token; lane l holds experts l, l + 32, …
template <int kPerLane>
__global__ void forward(RouterShape shape, int64_t per_warp, int64_t blocks_per_group, const float* all_logits,
                        const float* selection_bias, float* lse, int32_t* experts, float* weights, int32_t* counts,
                        float* partial_sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int expert_count = static_cast<int>(shape.experts), top_k = static_cast<int>(shape.top_k);
  __shared__ int histogram[kPerLane * 32];
  __shared__ float sums[kWarps][kPerLane * 32 + 1];
  for (int e = threadIdx.x; e < kPerLane * 32; e += kThreads) histogram[e] = 0;
  __syncthreads();

  const int64_t group = blockIdx.x / blocks_per_group, block = blockIdx.x % blocks_per_group;
  const int64_t group_tokens = shape.tokens / shape.groups;
  const int64_t begin = (block * kWarps + warp) * per_warp;
  const int64_t end = min(begin + per_warp, group_tokens);
  float totals[kPerLane] = {}, z_total = 0.0f;
  for (int64_t token = group * group_tokens + begin; token < group * group_tokens + end; ++token) {
    const float* row = all_logits + token * expert_count;
    float values[kPerLane], p[kPerLane];  // values: logits, then with sigmoid scores
    unsigned keys[kPerLane];
    float top = -INFINITY;
    for (int i = 0; i < kPerLane; ++i) {
      const int e = i * 32 + lane;
      values[i] = e < expert_count ? row[e] : -INFINITY;
      top = fmaxf(top, values[i]);
    }
    top = warp_max(top);
    float sum = 0.0f;
    for (int i = 0; i < kPerLane; ++i) {
      p[i] = i * 32 + lane < expert_count ? expf(values[i] - top) : 0.0f;
      sum += p[i];
    }
    sum = lane_sum<32>(sum);
    const float log_sum = top + logf(sum);
    if (shape.sigmoid) {
      sum = 0.0f;
      for (int i = 0; i < kPerLane; ++i) {
        p[i] = values[i] = sigmoid(values[i]);  // of −∞: 0
        sum += p[i];
      }
      sum = lane_sum<32>(sum);
    }
    const float inverse = 1.0f / sum;
    for (int i = 0; i < kPerLane; ++i) {
      const int e = i * 32 + lane;
      p[i] *= inverse;
      totals[i] += p[i];
      keys[i] = 0;
      if (e >= expert_count) continue;
      keys[i] = ordered(selection_bias == nullptr ? values[i] : (shape.sigmoid ? values[i] : p[i]) + selection_bias[e]);
    }
    if (shape.top_groups < shape.expert_groups) {
      const unsigned allowed = best_groups(shape, keys, lane);
      const int size = expert_count / static_cast<int>(shape.expert_groups);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if ((allowed >> min((i * 32 + lane) / size, 31) & 1u) == 0) keys[i] = 0;
      }
    }
    z_total += log_sum * log_sum;
    if (lane == 0) lse[token] = log_sum;

    int chosen = 0;           // lane j: the j-th expert
    float value = -INFINITY;  // and its logit, or with sigmoid its score
    for (int j = 0; j < top_k; ++j) {
      int expert;
      if (shape.forced) {
        expert = static_cast<int>((token * top_k + j) % expert_count);
      } else {
        unsigned best = 0;
        int best_expert = INT_MAX;
        for (int i = 0; i < kPerLane; ++i) {
          if (keys[i] > best) {
            best = keys[i];
            best_expert = i * 32 + lane;
          }
        }
        const unsigned highest = __reduce_max_sync(kAll, best);
        expert = __reduce_min_sync(kAll, best == highest ? best_expert : INT_MAX);
      }
      float mine = 0.0f;
      for (int i = 0; i < kPerLane; ++i) {
        if (i * 32 + lane == expert) {
          mine = values[i];
          keys[i] = 0;
        }
      }
      mine = __shfl_sync(kAll, mine, expert % 32);
      if (lane == j) {
        chosen = expert;
        value = mine;
      }
    }
    const bool active = lane < top_k;
    // Normalised weights are the softmax of the chosen logits; no probability need be above 0.
    const float shift = shape.normalize ? warp_max(value) : log_sum;
    float weight = !active ? 0.0f : shape.sigmoid ? value : expf(value - shift);
    if (shape.normalize) weight /= lane_sum<32>(weight) + (shape.sigmoid ? 1e-20f : 0.0f);
    if (active) {
      experts[token * top_k + lane] = chosen;
      weights[token * top_k + lane] = weight * shape.scale;
      atomicAdd(&histogram[chosen], 1);  // integers: any order gives the same sum
    }
  }

  for (int i = 0; i < kPerLane; ++i) sums[warp][i * 32 + lane] = totals[i];
  if (lane == 0) sums[warp][kPerLane * 32] = z_total;
  __syncthreads();
  for (int e = threadIdx.x; e <= expert_count; e += kThreads) {
    const int column = e == expert_count ? kPerLane * 32 : e;
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += sums[w][column];
    partial_sums[int64_t{blockIdx.x} * (expert_count + 1) + e] = sum;
    if (e < expert_count && histogram[e] > 0) {
      atomicAdd(&counts[group * expert_count + e], histogram[e]);
    }
  }
}

// Block (c, g) sums column tile c of group g's partial sums in a fixed order; block (0, G) sums z.
__global__ void finish(const float* partial_sums, int64_t blocks_per_group, int64_t groups, int64_t experts,
                       float* probability_sums, float* z_sum) {
  __shared__ double sums[32][33];
  const int64_t group = blockIdx.y;
  const bool z = group == groups;
  const int64_t column = z ? experts : int64_t{blockIdx.x} * 32 + threadIdx.x;
  const int64_t first = z ? 0 : group * blocks_per_group;
  const int64_t count = z ? groups * blocks_per_group : blocks_per_group;
  const bool active = z ? blockIdx.x == 0 && threadIdx.x == 0 : column < experts;
  double sum = 0.0;
  if (active) {
#pragma unroll 4
    for (int64_t b = threadIdx.y; b < count; b += 32) {
      sum += partial_sums[(first + b) * (experts + 1) + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || !active) return;
  sum = 0.0;
  for (int y = 0; y < 32; ++y) sum += sums[y][threadIdx.x];
  *(z ? z_sum : probability_sums + group * experts + column) = static_cast<float>(sum);
}

template <int kPerLane>
__global__ void backward(RouterShape shape, const float* logits, const float* lse, const int32_t* experts,
                         const float* weights, const float* d_weights, const float* balance_gradient,
                         float z_loss_gradient, float* d_logits, bf16* split) {
  const int64_t token = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (token >= shape.tokens) return;
  const int lane = threadIdx.x % 32;
  const int expert_count = static_cast<int>(shape.experts), top_k = static_cast<int>(shape.top_k);
  const float *row = logits + token * expert_count, log_sum = lse[token];
  const int64_t group = token / (shape.tokens / shape.groups);

  int chosen = -1;
  float weight = 0.0f, d_chosen = 0.0f;  // of the weight's logit, but for what a sum over scores adds
  if (lane < top_k && d_weights != nullptr) {
    chosen = experts[token * top_k + lane];
    weight = weights[token * top_k + lane];
    d_chosen = weight * d_weights[token * top_k + lane];
  }
  const float d_sum = lane_sum<32>(d_chosen);
  if (shape.normalize) d_chosen -= weight * d_sum / shape.scale;
  float softmax[kPerLane], scores[kPerLane], d_p[kPerLane], d_logit[kPerLane], total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * 32 + lane;
    const bool valid = e < expert_count;
    softmax[i] = valid ? expf(row[e] - log_sum) : 0.0f;
    scores[i] = valid && shape.sigmoid ? sigmoid(row[e]) : softmax[i];
    total += scores[i];
    d_p[i] = valid && balance_gradient != nullptr ? balance_gradient[group * expert_count + e] : 0.0f;
    d_logit[i] = 0.0f;
  }
  total = shape.sigmoid ? lane_sum<32>(total) : 1.0f;
  for (int j = 0; j < top_k; ++j) {
    const int e = __shfl_sync(kAll, chosen, j);
    const float d = __shfl_sync(kAll, d_chosen, j);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (e == i * 32 + lane) d_logit[i] += d;
    }
  }
  float mean = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) mean += scores[i] / total * d_p[i];
  mean = lane_sum<32>(mean);
  if (!shape.normalize && !shape.sigmoid) mean += d_sum;
  const float z = 2.0f * z_loss_gradient * log_sum;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * 32 + lane;
    if (e >= expert_count) continue;
    const float slope = shape.sigmoid ? 1.0f - scores[i] : 1.0f;
    const float d = slope * (d_logit[i] + scores[i] / total * (d_p[i] - mean)) + softmax[i] * z;
    if (split == nullptr) {
      d_logits[token * expert_count + e] = d;
      continue;
    }
    const bf16 high = __float2bfloat16_rn(d);
    split[token * 2 * expert_count + e] = high;
    split[(token * 2 + 1) * expert_count + e] = __float2bfloat16_rn(d - __bfloat162float(high));
  }
}

// Calls body with the number of experts a lane holds, as a compile-time constant.
template <typename Body>
void with_per_lane(int64_t experts, const Body& body) {
  if (experts <= 32) return body.template operator()<1>();
  if (experts <= 64) return body.template operator()<2>();
  if (experts <= 128) return body.template operator()<4>();
  if (experts <= 256) return body.template operator()<8>();
  body.template operator()<16>();
}

}  // namespace

int64_t router_blocks_per_group(const RouterShape& shape) {
  const int64_t per_block = tokens_per_warp(shape) * kWarps;
  return (shape.tokens / shape.groups + per_block - 1) / per_block;
}

void router_forward_cuda(const RouterShape& shape, View logits, View selection_bias, View lse, View experts,
                         View weights, View counts, View partial_sums, View probability_sums, View z_sum) {
  const int64_t blocks = router_blocks_per_group(shape);
  if (blocks > 0) {
    with_per_lane(shape.experts, [&]<int kPerLane>() {
      forward<kPerLane><<<static_cast<unsigned>(blocks * shape.groups), kThreads, 0, current_stream()>>>(
          shape, tokens_per_warp(shape), blocks, logits, selection_bias, lse, experts, weights, counts, partial_sums);
    });
  }
  const dim3 grid(blocks_for(shape.experts, 32), static_cast<unsigned>(shape.groups + 1));
  finish<<<grid, dim3(32, 32), 0, current_stream()>>>(partial_sums, blocks, shape.groups, shape.experts,
                                                      probability_sums, z_sum);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

void router_backward_cuda(const RouterShape& shape, View logits, View lse, View experts, View weights, View d_weights,
                          View balance_gradient, float z_loss_gradient, View d_logits) {
  if (shape.tokens == 0) return;
  const View none;
  with_per_lane(shape.experts, [&]<int kPerLane>() {
    backward<kPerLane><<<blocks_for(shape.tokens, kWarps), kThreads, 0, current_stream()>>>(
        shape, logits, lse, experts, weights, d_weights, balance_gradient, z_loss_gradient,
        d_logits.bf16 ? none : d_logits, d_logits.bf16 ? d_logits : none);
  });
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace marrow
