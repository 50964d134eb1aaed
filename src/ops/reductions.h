// Sums over flat gradient buffers.
#pragma once
#include "ops/pch.h"

namespace marrow {

// total += Σ flat². flat [n] fp32 (any shape, contiguous), total [1] fp64 on the same device.
// Accumulates in fp64 in a fixed order. No host synchronisation.
void add_sum_of_squares(const at::Tensor& flat, const at::Tensor& total);

}  // namespace marrow
