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
  uint8_t* transposed;  // [E, columns, transposed_width], or none
  float* scale;
  float* transposed_scale;
  int64_t transposed_width;
  Fp8ScaleStrides strides{}, transposed_strides{};  // of a whole tile's scales
  const int32_t* offsets = nullptr;                 // rows are those of experts, or none
  int32_t experts = 0;
  const int32_t* source = nullptr;  // row r is x[source[r]], or zeros for -1; or none
};

// The rows of a block's tile. The scale of row first + i and the tile's columns is at scales.first + i.
struct TileRows {
  int64_t first, end;
  Fp8Place scales;
};

__device__ TileRows tile_of_matrix(const Args& args) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTile;
  return {first, min(first + kTile, args.rows), {first, args.rows}};
}

// A tile has rows of one expert; without any behind the last. Each warp looks for itself.
__device__ TileRows tile_of_expert(const Args& args) {
  const int64_t across = (args.columns + kFp8Block - 1) / kFp8Block;
  const int lane = threadIdx.x % 32;
  int left = static_cast<int>(blockIdx.x);  // tiles of further experts before this one
  for (int e = lane; e - lane < args.experts; e += 32) {
    const int begin = e == 0 || e >= args.experts ? 0 : args.offsets[e - 1];
    const int count = e < args.experts ? args.offsets[e] - begin : 0, tiles = (count + kTile - 1) / kTile;
    int end = tiles;  // of the tiles of the experts from the first lane's on
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += before;
    }
    const unsigned behind = __ballot_sync(0xffffffffu, left < end);
    if (behind != 0) {
      const int own = 32 - __popc(behind);  // from the first such lane on all are
      const int64_t expert_begin = __shfl_sync(0xffffffffu, begin, own), rows = __shfl_sync(0xffffffffu, count, own);
      const int64_t inside = static_cast<int64_t>(left - __shfl_sync(0xffffffffu, end - tiles, own)) * kTile;
      return {expert_begin + inside, expert_begin + min(inside + kTile, rows), {expert_begin * across + inside, rows}};
    }
    left -= __shfl_sync(0xffffffffu, end, 31);
  }
  return {};
}

// A block has a tile of 128 × 128 elements, a thread a square of 8 × 8. kWhole: one scale for the tile. At most 80
// registers, so that three blocks fit a multiprocessor.
template <bool kWhole>
__global__ void __launch_bounds__(kThreads, 3) quantize_kernel(const __grid_constant__ Args args) {
  __shared__ uint32_t most[kThreads / 32][kTile / 2];  // of each warp's rows, pairs of columns
  __shared__ float inverses[kTile];                    // of the columns' scales
  __shared__ uint2 turned[kTile][kAcross];             // the tile's columns; chunks at places that no other lane hits
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross, warp = threadIdx.x / 32;
  const TileRows tile = args.offsets == nullptr ? tile_of_matrix(args) : tile_of_expert(args);
  if (tile.first == tile.end) return;
  const int64_t row = tile.first + down * kSide;
  const int64_t tile_column = static_cast<int64_t>(blockIdx.y) * kTile, column = tile_column + across * kSide;
  const int64_t matrix = blockIdx.z * args.rows * args.columns;

  Pack<bf16, kSide> in[kSide];
  for (int r = 0; r < kSide; ++r) {
    const bool inside = row + r < tile.end && column < args.columns;
    const int64_t source = inside && args.source != nullptr ? args.source[row + r] : row + r;
    const auto* from = reinterpret_cast<const uint4*>(args.x + matrix + source * args.columns + column);
    *reinterpret_cast<uint4*>(&in[r]) = inside && source >= 0 ? *from : uint4{};
  }

  float row_inverse[kSide];
  if (!kWhole && args.data != nullptr) {
    for (int r = 0; r < kSide; ++r) {
      uint32_t two = 0;
      for (int pair = 0; pair < kSide / 2; ++pair) two = larger(two, magnitudes(in[r], pair));
      for (int step = kAcross / 2; step > 0; step /= 2) two = larger(two, __shfl_xor_sync(0xffffffffu, two, step));
      const uint32_t scale = fp8_scale_bits(fp32_bits(two));
      row_inverse[r] = __uint_as_float(fp8_inverse_bits(scale));
      if (across != 0 || row + r >= tile.end) continue;
      const int64_t to = tile.scales.first + down * kSide + r;
      args.scale[to + blockIdx.y * tile.scales.step] = __uint_as_float(scale);
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
      if (row + r >= tile.end || column >= args.columns) continue;
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
    const int64_t to_column = tile_column + c, to_row = static_cast<int64_t>(blockIdx.x) * kTile + chunk * kSide;
    if (to_column >= args.columns || to_row >= args.transposed_width) continue;
    const uint2 low = turned[c][chunk ^ (c / kSide)], high = turned[c][(chunk + 1) ^ (c / kSide)];
    *reinterpret_cast<uint4*>(args.transposed + matrix + to_column * args.transposed_width + to_row) = {low.x, low.y,
                                                                                                        high.x, high.y};
  }
}

template <bool kWhole>
void launch(const Args& args, int64_t tiles, int64_t matrices) {
  if (args.rows == 0 || args.columns == 0 || matrices == 0) return;
  const dim3 grid(static_cast<unsigned>(tiles), blocks_for(args.columns, kTile), static_cast<unsigned>(matrices));
  quantize_kernel<kWhole><<<grid, kThreads, 0, current_stream()>>>(args);
  MARROW_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void quantize_rows_cuda(View x, View data, View scale, View transposed, View transposed_scale) {
  launch<false>({x, x.rows, x.width, data, transposed, scale, transposed_scale, x.rows}, blocks_for(x.rows, kTile), 1);
}

void quantize_expert_rows_cuda(View x, View source, View offsets, View data, View scale, View columns,
                               View columns_scale, int64_t tiles) {
  const int64_t rows = source.defined() ? source.elements : x.rows;
  Args args{x, rows, x.width, data, columns, scale, columns_scale, tiles * kTile};
  args.offsets = offsets;
  args.experts = static_cast<int32_t>(offsets.elements);
  args.source = source;
  launch<false>(args, tiles, 1);
}

void quantize_weight_cuda(View weight, int64_t n, int64_t k, View data, View scale, Fp8ScaleStrides strides,
                          View transposed, View transposed_scale, Fp8ScaleStrides transposed_strides) {
  const Args args{weight, n, k, data, transposed, scale, transposed_scale, n, strides, transposed_strides};
  launch<true>(args, blocks_for(n, kTile), weight.elements / (n * k));
}

}  // namespace marrow
