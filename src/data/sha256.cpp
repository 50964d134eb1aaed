#include "data/sha256.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace marrow {
namespace {

// The first 32 bits of the fraction of `value`'s `root`-th root, exactly: the largest r with
// r^root <= value · 2^(32 root), by bisection.
uint32_t root_fraction(uint64_t value, int root) {
  uint64_t low = 0, high = uint64_t{1} << 37;
  const unsigned __int128 scaled = static_cast<unsigned __int128>(value) << (32 * root);
  while (high - low > 1) {
    const uint64_t middle = (low + high) / 2;
    unsigned __int128 power = 1;
    for (int i = 0; i < root; ++i) power *= middle;
    (power <= scaled ? low : high) = middle;
  }
  return static_cast<uint32_t>(low);
}

struct Constants {
  std::array<uint32_t, 64> rounds;  // of the cube roots of the first 64 primes
  std::array<uint32_t, 8> state;    // of the square roots of the first 8
  Constants() {
    size_t count = 0;
    for (uint64_t candidate = 2; count < rounds.size(); ++candidate) {
      bool prime = true;
      for (uint64_t d = 2; d * d <= candidate; ++d) prime = prime && candidate % d != 0;
      if (!prime) continue;
      if (count < state.size()) state[count] = root_fraction(candidate, 2);
      rounds[count++] = root_fraction(candidate, 3);
    }
  }
};

void add_block(const char* block, const Constants& constants, std::array<uint32_t, 8>& state) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) {
    uint32_t big_endian;
    std::memcpy(&big_endian, block + 4 * i, 4);
    w[i] = __builtin_bswap32(big_endian);
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                           ((e & f) ^ (~e & g)) + constants.rounds[i] + w[i];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state[i] += added[i];
}

}  // namespace

std::string sha256_hex(std::string_view data) {
  const Constants constants;
  std::array<uint32_t, 8> state = constants.state;
  size_t at = 0;
  for (; at + 64 <= data.size(); at += 64) add_block(data.data() + at, constants, state);
  std::string tail(data.substr(at));
  tail.push_back('\x80');
  while (tail.size() % 64 != 56) tail.push_back('\0');
  for (int shift = 56; shift >= 0; shift -= 8) {
    tail.push_back(static_cast<char>(uint64_t{data.size()} * 8 >> shift));
  }
  for (at = 0; at < tail.size(); at += 64) add_block(tail.data() + at, constants, state);
  std::string hex;
  for (const uint32_t word : state) hex += fmt::format("{:08x}", word);
  return hex;
}

}  // namespace marrow
