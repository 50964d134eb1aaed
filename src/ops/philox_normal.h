// Initial values that depend on (seed, name, element) alone: the same bits on any mesh and device.
#pragma once
#include "ops/pch.h"

namespace marrow {

// Fills `out` ([n] contiguous, fp32 or bf16, CPU or CUDA) with normals of mean 0 and the given
// standard deviation. Element i is a pure function of (seed, name, first_element + i), equal to the
// bit on CPU and GPU; bf16 is the rounded fp32 value. Philox4x32-10 and Box-Muller, with log, sin
// and cos in plain fp32 arithmetic that is never contracted into FMA.
void philox_normal(at::Tensor out, int64_t seed, std::string_view name, int64_t first_element, double std);

// So too, for the few elements of a vector: ln of numbers uniform in (0, high), at least 0.01. Made on the CPU.
void philox_log_uniform(at::Tensor out, int64_t seed, std::string_view name, int64_t first_element, double high);

}  // namespace marrow
