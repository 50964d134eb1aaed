#pragma once
#include <cstdint>

namespace marrow {

constexpr int64_t kPairsPerBlock = 2048;  // of a counting sort's block

// Sorts the pairs by expert, stable. experts [pairs]; block_rows [blocks, experts] is scratch for
// blocks = ⌈pairs / kPairsPerBlock⌉. Outputs as in ExpertPermutation, all int32.
void expert_permutation_cuda(const int32_t* experts, int64_t pairs, int64_t top_k,
                             int64_t expert_count, int32_t* block_rows, int32_t* offsets,
                             int32_t* source_of_row, int32_t* rows_of_source, int32_t* slot_of_row,
                             void* stream);

}  // namespace marrow
