// Moving rows between token order and expert order, both ways, with gradients.
#pragma once
#include "ops/expert_permutation.h"
#include "ops/row_map.h"

namespace marrow {

// out[r] = x[source_of_row[r]] for r < rows; a row without a source (-1) is zero.
// x [T, H] fp32 or bf16 → [rows, H]; rows ≤ R of the map.
at::Tensor gather_rows(const at::Tensor& x, const RowMap& map, int64_t rows);

// out[t] = residual[t] + Σ_j rows[rows_of_source[t, j]], summed in fp32 in the order of j.
// rows [R, H] fp32 or bf16, residual [T, H] of the same dtype or undefined → [T, H].
at::Tensor sum_rows(const at::Tensor& rows, const RowMap& map, const at::Tensor& residual);

// out[r] = weights.flat[slot_of_row[r]]: weights [T, k] fp32 → [T·k] fp32, 0 where a row has no
// pair.
at::Tensor gather_values(const at::Tensor& weights, const ExpertPermutation& permutation);

}  // namespace marrow
