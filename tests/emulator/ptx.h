// The instructions of PTX that kernels use as inline assembly: dots of the name are underscores here, operands in the
// order of the assembly's lists.
#pragma once
#include <bit>
#include <cmath>

#include "emulator/emulator.h"

namespace emulator::ptx {

// Four blocks of 8 × 8 elements of 16 bits; lane 8·b + r names the place of row r of block b. A lane gets elements
// (lane / 4, lane % 4 · 2) and the next one of each, of the transposed ones where kTranspose.
struct alignas(16) Row {
  unsigned short items[8];
};
inline Row load_row(unsigned address) { return *reinterpret_cast<const Row*>(shared_memory + address); }
template <bool kTranspose>
EMULATOR_OWN void load_blocks(unsigned (&to)[4], unsigned address, Where where = Where::current()) {
  unsigned char* lanes = slots();
  const Row mine = load_row(address);  // the sanitizers see it: aligned, and inside
  std::memcpy(lanes + current->lane() * kSlot, &mine, sizeof(mine));
  meet(~0u, where);
  const unsigned row = current->lane() / 4, column = current->lane() % 4 * 2;
  const auto item = [&](unsigned block, unsigned r, unsigned c) EMULATOR_OWN {
    return unsigned{reinterpret_cast<const unsigned short*>(lanes + (8 * block + (kTranspose ? c : r)) *
                                                                        kSlot)[kTranspose ? r : c]};
  };
  for (unsigned block = 0; block < 4; ++block)
    to[block] = item(block, row, column) | item(block, row, column + 1) << 16;
}

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
                                                     unsigned address) {
  unsigned to[4];
  load_blocks<false>(to, address);
  a = to[0], b = to[1], c = to[2], d = to[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
                                                           unsigned address) {
  unsigned to[4];
  load_blocks<true>(to, address);
  a = to[0], b = to[1], c = to[2], d = to[3];
}

// sums [16, 8] += a [16, 16] · b [16, 8]. Lane 4·g + t has of the sums rows g (d0, d1) and g + 8 (d2, d3) in columns
// 2t and 2t + 1; of a the pairs at 2t of rows g (a0) and g + 8 (a1), and at 2t + 8 (a2, a3); of b column g, the pairs
// at 2t (b0) and 2t + 8 (b1).
EMULATOR_OWN inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3,
                                                                             unsigned a0, unsigned a1, unsigned a2,
                                                                             unsigned a3, unsigned b0, unsigned b1,
                                                                             Where where = Where::current()) {
  struct alignas(kSlot) Words {
    unsigned words[8];
  };
  auto* lanes = reinterpret_cast<Words*>(slots());
  lanes[current->lane()] = {{a0, a1, a2, a3, b0, b1}};
  meet(~0u, where);
  const auto low = [](unsigned pair) EMULATOR_OWN { return std::bit_cast<float>(pair << 16); };
  const auto high = [](unsigned pair) EMULATOR_OWN { return std::bit_cast<float>(pair & 0xffff0000u); };
  const unsigned g = current->lane() / 4, t = current->lane() % 4;
  float sums[2][2] = {{d0, d1}, {d2, d3}};
  for (unsigned k = 0; k < 8; ++k) {  // pairs
    const unsigned* a = lanes[4 * g + k % 4].words + k / 4 * 2;
    for (unsigned column = 0; column < 2; ++column) {
      const unsigned b = lanes[4 * (2 * t + column) + k % 4].words[4 + k / 4];
      for (unsigned row = 0; row < 2; ++row) sums[row][column] += low(a[row]) * low(b) + high(a[row]) * high(b);
    }
  }
  d0 = sums[0][0], d1 = sums[0][1], d2 = sums[1][0], d3 = sums[1][1];
}

// Right to 2 units of the last place on a GPU; what is below 2^-126 is 0.
inline void ex2_approx_ftz_f32(float& power, float exponent) {
  power = exponent < -126.0f ? 0.0f : std::exp2(exponent);
}

}  // namespace emulator::ptx
