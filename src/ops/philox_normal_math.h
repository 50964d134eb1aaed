// The arithmetic of philox_normal and its CUDA kernel: the same source for CPU and GPU. Every fp32 product and sum is
// rounded on its own: the GPU by intrinsics, the CPU because philox_normal.cpp forbids contraction.
#pragma once
#include <cmath>
#include <cstdint>

#include "ops/cuda_kernels.h"

#ifdef __CUDACC__
#define MARROW_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MARROW_HOST_DEVICE inline
#endif

namespace marrow::philox {

struct Key {
  uint64_t seed;
  uint64_t name;  // FNV-1a hash
};

#ifdef __CUDA_ARCH__
MARROW_HOST_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
MARROW_HOST_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
MARROW_HOST_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
#else
MARROW_HOST_DEVICE float mul(float a, float b) { return a * b; }
MARROW_HOST_DEVICE float add(float a, float b) { return a + b; }
MARROW_HOST_DEVICE float square_root(float x) { return std::sqrt(x); }  // rounded right by IEEE 754
#endif

// Philox4x32-10 (Salmon et al., 2011): counter (block, name), key seed → 4 random words.
MARROW_HOST_DEVICE void words_of_block(const Key& key, uint64_t block, uint32_t (&words)[4]) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
  uint32_t c2 = static_cast<uint32_t>(key.name), c3 = static_cast<uint32_t>(key.name >> 32);
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// ln u for u = (word + 1/2) · 2⁻³², the polynomial of Cephes' logf.
MARROW_HOST_DEVICE float log_of_word(uint32_t word) {
  const uint64_t odd = 2 * uint64_t{word} + 1;  // u · 2³³
  int exponent = 0;
  uint64_t top = odd;
  for (int step = 32; step > 0; step /= 2) {
    if (top >> step != 0) {
      top >>= step;
      exponent += step;
    }
  }
  // u · 2^(33 − exponent) in [1, 2), cut to 24 bits, then brought to [√½, √2).
  const uint64_t mantissa = exponent > 23 ? odd >> (exponent - 23) : odd << (23 - exponent);
  float m = mul(static_cast<float>(static_cast<uint32_t>(mantissa)), 1.0f / 8388608.0f);
  if (m > 1.41421356f) {
    m = mul(m, 0.5f);
    ++exponent;
  }
  const float x = add(m, -1.0f);
  const float z = mul(x, x);
  float p = 7.0376836292e-2f;
  p = add(mul(p, x), -1.1514610310e-1f);
  p = add(mul(p, x), 1.1676998740e-1f);
  p = add(mul(p, x), -1.2420140846e-1f);
  p = add(mul(p, x), 1.4249322787e-1f);
  p = add(mul(p, x), -1.6668057665e-1f);
  p = add(mul(p, x), 2.0000714765e-1f);
  p = add(mul(p, x), -2.4999993993e-1f);
  p = add(mul(p, x), 3.3333331174e-1f);
  const float tail = add(mul(mul(p, x), z), mul(z, -0.5f));
  return add(add(x, tail), mul(static_cast<float>(exponent - 33), 0.69314718f));
}

// cos and sin of 2π · (word + 1/2) · 2⁻³²: a quadrant, and the polynomials of Cephes' sinf and cosf on [−π/4, π/4].
MARROW_HOST_DEVICE void circle_of_word(uint32_t word, float& cosine, float& sine) {
  const auto within = static_cast<int32_t>(word << 2 | 2u);
  const float angle = mul(static_cast<float>(within), 1.57079633f / 4294967296.0f);
  const float z = mul(angle, angle);
  float s = add(mul(-1.9515295891e-4f, z), 8.3321608736e-3f);
  s = add(mul(s, z), -1.6666654611e-1f);
  s = add(mul(mul(s, z), angle), angle);
  float c = add(mul(2.443315711809948e-5f, z), -1.388731625493765e-3f);
  c = add(mul(c, z), 4.166664568298827e-2f);
  c = add(mul(mul(c, z), z), add(mul(z, -0.5f), 1.0f));
  const uint32_t quadrant = word >> 30;
  const float x = quadrant % 2 == 0 ? c : s;
  const float y = quadrant % 2 == 0 ? s : c;
  cosine = quadrant == 1 || quadrant == 2 ? -x : x;
  sine = quadrant >= 2 ? -y : y;
}

// Elements 4·block … 4·block + 3 with standard deviation 1 (Box–Muller).
MARROW_HOST_DEVICE void normals_of_block(const Key& key, uint64_t block, float (&normals)[4]) {
  uint32_t words[4];
  words_of_block(key, block, words);
  for (int pair = 0; pair < 2; ++pair) {
    const float radius = square_root(mul(-2.0f, log_of_word(words[2 * pair])));
    float cosine = 0, sine = 0;
    circle_of_word(words[2 * pair + 1], cosine, sine);
    normals[2 * pair] = mul(radius, cosine);
    normals[2 * pair + 1] = mul(radius, sine);
  }
}

}  // namespace marrow::philox

namespace marrow {

// Fills out [n], fp32 or bf16 in device memory, with elements first_element … of the key.
void philox_normal_cuda(View out, const philox::Key& key, int64_t first_element, float std);

}  // namespace marrow
