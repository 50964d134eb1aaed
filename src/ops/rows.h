// Moving rows between token order and expert order, both ways, with gradients.
#pragma once
#include "ops/expert_rows.h"

namespace marrow {

// Which of T source rows feed which of R target rows: a target has one source, a source up to m targets. gather_rows
// goes from source to target, sum_rows from target to source; each is the other's backward. Built by expert_permutation
// (tokens × top-k → rows sorted by expert) and by the expert dispatch (rows received from each rank).
struct RowMap {
  at::Tensor source_of_row;   // [R] int32, in [0, T)
  at::Tensor rows_of_source;  // [T, m] int32, in [0, R), or -1 for none
};

// The order of expert rows: (token, choice) pairs sorted by expert.
struct ExpertPermutation {
  RowMap map;              // source: tokens [T]; rows: pairs [T·k], sorted by expert, then by token
  at::Tensor offsets;      // [E] int32: end row of each expert, cumulative; the last is R
  at::Tensor slot_of_row;  // [T·k] int32: t·k + j of the pair behind each row
};

// The order by ranks that have `experts_of_rank` > 1 experts each: of a token's pairs of one rank the first alone has a
// row; with 1 by experts, whose every pair has one. experts [T, k] int32. A pair outside of all ranks, or left out, has
// -1 in rows_of_source; R < T·k is then known on the device only, and source_of_row and slot_of_row are -1 from row R
// on. Stable and deterministic; no host synchronisation. ranks ≤ 1024.
ExpertPermutation rank_permutation(const at::Tensor& experts, int64_t ranks, int64_t experts_of_rank);
inline ExpertPermutation expert_permutation(const at::Tensor& experts, int64_t expert_count) {
  return rank_permutation(experts, expert_count, 1);
}

// out[r] = x[source_of_row[r]] for r < rows ≤ R; zero without a source (-1). x [T, H] fp32 or bf16 → [rows, H].
// offsets, of an ExpertPermutation: rows from R on do not exist, and hold anything.
at::Tensor gather_rows(const at::Tensor& x, const RowMap& map, int64_t rows, const at::Tensor& offsets = {});

// The same with offsets, for the product with `reader` [E, ..]: handed over in fp8 too where that is in fp8.
ExpertRows gather_expert_rows(const at::Tensor& x, const ExpertPermutation& permutation, int64_t rows,
                              const Parameter& reader);

// out[t] = residual[t] + Σ_j rows[rows_of_source[t, j]], summed in fp32 in the order of j. rows [R, H] fp32 or bf16,
// residual [T, H] of the same dtype or undefined → [T, H].
at::Tensor sum_rows(const ExpertRows& rows, const RowMap& map, const at::Tensor& residual);
inline at::Tensor sum_rows(const at::Tensor& rows, const RowMap& map, const at::Tensor& residual) {
  return sum_rows(ExpertRows{rows, {}}, map, residual);
}

// out[r] = weights.flat[slot_of_row[r]] for r < rows, at least those that have a pair: weights [T, k] fp32 → [rows]
// fp32, 0 where a row has no pair.
at::Tensor gather_values(const at::Tensor& weights, const ExpertPermutation& permutation, int64_t rows);

}  // namespace marrow
