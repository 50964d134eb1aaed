// A layer's exchange of tokens between GPUs of one host, written by kernels into each other's memory: an experiment
// beside src/parallel/expert_dispatch. What its kernels share with their launchers; torch-free.
#pragma once
#include <cstdint>

struct CUstream_st;

namespace marrow::nvlink {

constexpr int kMaxRanks = 8;
constexpr int kMaxBlocks = 64;  // of a kernel that meets those of other ranks: all must be resident
constexpr int kThreads = 1024;  // of such a block: it has a multiprocessor to itself
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kEpochsPerLaunch = 4;  // a launch may meet the other ranks that often

// Who waited for whom when a kernel gave up, in memory that the host can read after a trap.
struct StuckReport {
  int32_t stuck, rank, block, for_rank, for_block;
  uint32_t has, wants;
};

// What every kernel takes by value. A window is memory of one rank that the others can write; its parts lie at the same
// offsets on every rank. T tokens a rank, k choices a token, E experts, of which each rank has the next E / ranks.
struct Exchange {
  char* windows[kMaxRanks] = {};  // the rank's own too
  int32_t rank = 0, ranks = 1;
  int64_t tokens = 0, top_k = 0, experts = 0, row_bytes = 0;
  StuckReport* stuck = nullptr;
  uint64_t patience = 5'000'000'000;  // nanoseconds that a kernel waits for another rank

  // Offsets in a window.
  int64_t flags = 0;         // [ranks, kMaxBlocks] uint32: the last epoch that a rank's block has reached
  int64_t counts = 0;        // [ranks, kMaxBlocks, E] int32: pairs of an expert in a block's share of the tokens
  int64_t rows_of_pair = 0;  // [ranks · T, k] int32: expert row here of every rank's pairs, -1 for other ranks' experts
  int64_t weights = 0;       // [ranks · T, k] fp32
  int64_t own_tokens = 0;    // [T, H] that the others pull
  int64_t arrived = 0;       // [ranks · T, H] that the others push
  int64_t partials = 0;      // [ranks · T, H] sums over each rank's experts, for this rank's tokens
  int64_t bytes = 0;

  void lay_out() {
    const auto part = [this](int64_t& offset, int64_t size) {
      offset = bytes;
      bytes += (size + 255) / 256 * 256;
    };
    const int64_t pairs = ranks * tokens * top_k;
    bytes = 0;
    part(flags, int64_t{ranks} * kMaxBlocks * 4);
    part(counts, ranks * kMaxBlocks * experts * 4);
    part(rows_of_pair, pairs * 4);
    part(weights, pairs * 4);
    part(own_tokens, tokens * row_bytes);
    part(arrived, ranks * tokens * row_bytes);
    part(partials, ranks * tokens * row_bytes);
  }
};

// The kernels. `epoch` grows by kEpochsPerLaunch with every launch, in the same order and with the same number of
// blocks on every rank. Pointers without a word about windows are to a rank's own memory, of any kind.
//
// make_plan: choices [T, k] int32, weights [T, k] → rows_of_pair and weights of every window; offsets [E / ranks]
// int32, end row of each own expert; rows_of_token [T, ranks] int32, rows of `partials` that hold a token's sums, or
// -1. Rows are sorted by expert, then by rank, then by token.
struct Plan {
  const int32_t* choices;
  const float* weights;
  int32_t* offsets;
  int32_t* rows_of_token;
};
void launch_plan(const Exchange& exchange, uint32_t epoch, int blocks, const Plan& plan, CUstream_st* stream);
// Every rank's tokens, read from its window once, to the rows of this rank's experts: rows [R, H], row_weights [R].
void launch_pull(const Exchange& exchange, uint32_t epoch, int blocks, char* rows, float* row_weights,
                 CUstream_st* stream);
void launch_plan_and_pull(const Exchange& exchange, uint32_t epoch, int blocks, const Plan& plan, char* rows,
                          float* row_weights, CUstream_st* stream);
// Tokens [T, H] to `arrived` of the ranks that have an expert of theirs; then, without meeting anyone, from there (and
// from `tokens`, this rank's own) to the rows of experts.
void launch_push(const Exchange& exchange, uint32_t epoch, int blocks, const int32_t* choices, const char* tokens,
                 CUstream_st* stream);
void launch_spread(const Exchange& exchange, const char* tokens, char* rows, float* row_weights, CUstream_st* stream);
// Sums of the rows [R, H] bf16 of each token, in fp32 in the order of its choices, to `partials` of the token's rank.
void launch_combine(const Exchange& exchange, uint32_t epoch, int blocks, const char* rows, CUstream_st* stream);
// Meets the other ranks once, and that is all.
void launch_meet(const Exchange& exchange, uint32_t epoch, int blocks, CUstream_st* stream);
void launch_delay(uint64_t nanoseconds, CUstream_st* stream);

}  // namespace marrow::nvlink
