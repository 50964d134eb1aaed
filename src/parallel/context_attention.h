// Attention over sequences that are split among the ranks of a context group: zigzag chunks, keys and
// values going round a ring while the ranks compute.
#pragma once
#include "ops/attention.h"
#include "ops/attention_kernels.h"
#include "ops/pch.h"
#include "parallel/communicator.h"

namespace marrow {

// Rank c of cp holds chunks c and 2·cp − 1 − c of the 2·cp chunks of each sequence, so that causal work
// is even; sequences one after another. The places within a sequence of the rank's rows of it, ascending.
std::vector<int64_t> zigzag_positions(int64_t seq_len, int64_t cp, int64_t c);

// attention() of the micro-batch that `layout` describes whole, over all ranks of `ring`, each with its rows of q, k
// and v; seq_len divides by 2·cp. No ring, or one rank: attention() itself. Every rank must call it, and its backward,
// in the same order. Keys travel in their own dtype, their gradients in fp32. bf16 on the GPU: cuDNN, or flash with
// documents, a window or `deterministic`. Each rank adds its rows' part of the gradient of `sinks`.
at::Tensor context_attention(const at::Tensor& q,  // [T / cp, Hq, D]
                             const at::Tensor& k,  // [T / cp, Hkv, D]
                             const at::Tensor& v,  // [T / cp, Hkv, Dv]
                             const AttentionLayout& layout, double scale, bool deterministic, Communicator* ring,
                             const Parameter& sinks = {});

// What follows is how a step of the ring is computed, pure functions for tests. `c` asks, `peer` owns the keys.

// Which of peer's rows each of c's rows sees.
RowAttention ring_rows(const AttentionLayout&, int64_t cp, int64_t c, int64_t peer, double scale);

// The same as rectangles for the GPU's kernels: in each of the sequences [sequence, sequence +
// sequences), `queries` rows from q_first see `keys` rows from k_first.
struct RingBlock {
  int64_t sequence = 0, sequences = 0;
  int64_t q_first = 0, queries = 0;  // rows within the rank's part of a sequence
  int64_t k_first = 0, keys = 0;
  bool causal = false;               // row i of the block sees keys 0 … i, else all
  int64_t left = -1;                 // row i sees no key before i + keys − queries − left; −1: no limit
  std::vector<int32_t> pieces = {};  // not empty: offsets among all of the rank's rows, each piece for itself
};
std::vector<RingBlock> ring_blocks(const AttentionLayout&, int64_t cp, int64_t c, int64_t peer);

}  // namespace marrow
