#include "ops/fp8_rows.cuh"

namespace marrow {
namespace {

constexpr int kTile = kFp8Block, kThreads = 256;
constexpr int kSide = 8;                // of a thread's square of elements
constexpr int kAcross = kTile / kSide;  // squares along a tile's side

struct Args {
  const bf16* x;  // [E, rows, columns]
  int64_t rows, columns;
  uint8_t* data;        // [E, rows, columns], or none
  uint8_t* transposed;  // [E, columns, rows], or none
  float* scale;
  float* transposed_scale;
  Fp8ScaleStrides strides, transposed_strides;  // of a whole tile's scales
  const int32_t* offsets;                       // rows are those of experts, or none
  int32_t experts;
};

// A block has a tile of 128 × 128 elements, a thread a square of 8 × 8. kWhole: one scale for the tile.
template <bool kWhole>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ Args args) {
  __shared__ uint32_t most[kThreads / 32][kTile / 2];  // of each warp's rows, pairs of columns
  __shared__ float inverses[kTile];                    // of the columns' scales
  __shared__ uint2 turned[kTile][kAcross];             // the tile's columns; chunks at places that no other lane hits
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross, warp = threadIdx.x / 32;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.x) * kTile, row = tile_row + down * kSide;
  const int64_t tile_column = static_cast<int64_t>(blockIdx.y) * kTile, column = tile_column + across * kSide;
  const int64_t matrix = blockIdx.z * args.rows * args.columns;

  Pack<bf16, kSide> in[kSide];
  for (int r = 0; r < kSide; ++r) {
    const bool inside = row + r < args.rows && column < args.columns;
    const auto* from = reinterpret_cast<const uint4*>(args.x + matrix + (row + r) * args.columns + column);
    *reinterpret_cast<uint4*>(&in[r]) = inside ? *from : uint4{};
  }

  float row_inverse[kSide];
  if (!kWhole && args.data != nullptr) {
    for (int r = 0; r < kSide; ++r) {
      uint32_t two = 0;
      for (int pair = 0; pair < kSide / 2; ++pair) two = larger(two, magnitudes(in[r], pair));
      for (int step = kAcross / 2; step > 0; step /= 2) two = larger(two, __shfl_xor_sync(0xffffffffu, two, step));
      const uint32_t scale = fp8_scale_bits(fp32_bits(two));
      row_inverse[r] = __uint_as_float(fp8_inverse_bits(scale));
      if (across != 0 || row + r >= args.rows) continue;
      const Fp8Place place = args.offsets == nullptr ? Fp8Place{row + r, args.rows}
                                                     : place_of_row(args.offsets, args.experts, row + r, args.columns);
      if (place.first >= 0) args.scale[place.first + blockIdx.y * place.step] = __uint_as_float(scale);
    }
  }
  if (kWhole || args.transposed != nullptr) {
    for (int pair = 0; pair < kSide / 2; ++pair) {
      uint32_t two = 0;
      for (int r = 0; r < kSide; ++r) two = larger(two, magnitudes(in[r], pair));
      two = larger(two, __shfl_xor_sync(0xffffffffu, two, kAcross));  // the warp's other rows
      if (threadIdx.x % 32 < kAcross) most[warp][across * kSide / 2 + pair] = two;
    }
    __syncthreads();
    if (threadIdx.x < kTile / 2) {
      uint32_t two = 0;
      for (int w = 0; w < kThreads / 32; ++w) two = larger(two, most[w][threadIdx.x]);
      if constexpr (kWhole) {
        most[0][threadIdx.x] = two;
      } else {
        for (int side = 0; side < 2; ++side) {
          const uint32_t scale = fp8_scale_bits((side == 0 ? two & 0xffffu : two >> 16) << 16);
          const int64_t own = tile_column + 2 * threadIdx.x + side;
          inverses[2 * threadIdx.x + side] = __uint_as_float(fp8_inverse_bits(scale));
          if (own < args.columns) args.transposed_scale[blockIdx.x * args.columns + own] = __uint_as_float(scale);
        }
      }
    }
    __syncthreads();
  }
  if constexpr (kWhole) {
    uint32_t two = 0;
    for (int pair = 0; pair < kTile / 2; ++pair) two = larger(two, most[0][pair]);
    const uint32_t scale = fp8_scale_bits(fp32_bits(two));
    for (float& inverse : row_inverse) inverse = __uint_as_float(fp8_inverse_bits(scale));
    if (threadIdx.x == 0) {
      const int64_t first = static_cast<int64_t>(blockIdx.z) * gridDim.x * gridDim.y;  // used with experts alone
      args.scale[first + blockIdx.x * args.strides.row + blockIdx.y * args.strides.column] = __uint_as_float(scale);
      args.transposed_scale[first + blockIdx.y * args.transposed_strides.row +
                            blockIdx.x * args.transposed_strides.column] = __uint_as_float(scale);
    }
  }

  if (args.data != nullptr) {
    for (int r = 0; r < kSide; ++r) {
      if (row + r >= args.rows || column >= args.columns) continue;
      *reinterpret_cast<uint2*>(args.data + matrix + (row + r) * args.columns + column) =
          pack_e4m3([&](int i) { return static_cast<float>(in[r].items[i]) * row_inverse[r]; });
    }
  }
  if (args.transposed == nullptr) return;
  for (int c = 0; c < kSide; ++c) {
    const float inverse = kWhole ? row_inverse[0] : inverses[across * kSide + c];
    turned[across * kSide + c][down ^ across] =
        pack_e4m3([&](int i) { return static_cast<float>(in[i].items[c]) * inverse; });
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTile * kAcross / 2; i += kThreads) {
    const int c = i / (kAcross / 2), chunk = 2 * (i % (kAcross / 2));
    const int64_t to_column = tile_column + c, to_row = tile_row + chunk * kSide;
    if (to_column >= args.columns || to_row >= args.rows) continue;
    const uint2 low = turned[c][chunk ^ (c / kSide)], high = turned[c][(chunk + 1) ^ (c / kSide)];
    *reinterpret_cast<uint4*>(args.transposed + matrix + to_column * args.rows + to_row) = {low.x, low.y, high.x,
                                                                                            high.y};
  }
}

template <bool kWhole>
void launch(const Args& args, int64_t matrices) {
  if (args.rows == 0 || args.columns == 0 || matrices == 0) return;
  const dim3 grid(blocks_for(args.rows, kTile), blocks_for(args.columns, kTile), static_cast<unsigned>(matrices));
  quantize_kernel<kWhole><<<grid, kThreads, 0, current_stream()>>>(args);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void quantize_rows_cuda(View x, View data, View scale, View transposed, View transposed_scale, View offsets) {
  launch<false>({x,
                 x.rows,
                 x.width,
                 data,
                 transposed,
                 scale,
                 transposed_scale,
                 {},
                 {},
                 offsets,
                 static_cast<int32_t>(offsets.elements)},
                1);
}

void quantize_weight_cuda(View weight, int64_t n, int64_t k, View data, View scale, Fp8ScaleStrides strides,
                          View transposed, View transposed_scale, Fp8ScaleStrides transposed_strides) {
  launch<true>({weight, n, k, data, transposed, scale, transposed_scale, strides, transposed_strides, nullptr, 0},
               weight.elements / (n * k));
}

}  // namespace marrow
