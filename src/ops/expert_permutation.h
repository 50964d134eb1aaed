// The order of expert rows: (token, choice) pairs sorted by expert.
#pragma once
#include "ops/row_map.h"

namespace marrow {

struct ExpertPermutation {
  RowMap map;              // source: tokens [T]; rows: pairs [T·k], sorted by expert, then by token
  at::Tensor offsets;      // [E] int32: end row of each expert, cumulative; the last is R
  at::Tensor slot_of_row;  // [T·k] int32: t·k + j of the pair behind each row
};

// experts [T, k] int32. A pair whose expert is outside [0, expert_count) gets no row: its
// rows_of_source is -1, R < T·k is known on the device only, and source_of_row and slot_of_row are
// -1 from row R on. Stable and deterministic; no host synchronisation. expert_count ≤ 1024.
ExpertPermutation expert_permutation(const at::Tensor& experts, int64_t expert_count);

}  // namespace marrow
