#pragma once
#include <cstdint>

namespace marrow {

// out [count, width] elements of element_size bytes: out[r] = x[source[r]], zero where source is
// -1.
void gather_rows_cuda(const void* x, const int32_t* source, void* out, int64_t count, int64_t width,
                      int64_t element_size, void* stream);

// out[t] = residual[t] (or 0 where null) + Σ_j rows[rows_of_source[t, j]] over 0 ≤ index <
// row_count, for t < count; bf16 or fp32, sums in fp32.
void sum_rows_cuda(const void* rows, const int32_t* rows_of_source, const void* residual, void* out,
                   int64_t count, int64_t sources, int64_t row_count, int64_t width, bool bf16,
                   void* stream);

// out[i] = values[index[i]], 0 where index is -1.
void gather_values_cuda(const float* values, const int32_t* index, float* out, int64_t count,
                        void* stream);

}  // namespace marrow
