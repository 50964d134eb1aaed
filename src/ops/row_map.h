// Which rows of one matrix feed which rows of another: tokens to expert rows, and back.
#pragma once
#include "ops/pch.h"

namespace marrow {

// T source rows, R target rows; every target row has one source, a source up to m targets.
// gather_rows goes from source to target, sum_rows from target to source; each is the other's
// backward. Built by expert_permutation (tokens × top-k → rows sorted by expert) and by the
// expert dispatch (rows received from each rank).
struct RowMap {
  at::Tensor source_of_row;   // [R] int32, in [0, T)
  at::Tensor rows_of_source;  // [T, m] int32, in [0, R), or -1 for none
};

}  // namespace marrow
