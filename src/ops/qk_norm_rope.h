// Rotary position tables, and RMSNorm of q and k heads followed by rotation.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// cos and sin of position · inverse frequency, times a scale (YaRN's; else 1).
struct RopeTable {
  at::Tensor cos;  // [P, D/2] fp32
  at::Tensor sin;  // [P, D/2] fp32
};

// theta^(-2i/dim), i < dim/2.
std::vector<double> rope_inverse_frequencies(double theta, int64_t dim);

// YaRN (Peng et al., arXiv 2309.00071) of such frequencies: pairs that turn more than beta_fast times over the original
// length keep theirs, those that turn less than beta_slow times are slowed by `factor`, a ramp between.
struct YarnScaling {
  double factor = 1, original_length = 1, beta_fast = 32, beta_slow = 1;
  bool truncate = true;  // the ramp's ends to whole pairs
};
std::vector<double> yarn_inverse_frequencies(double theta, int64_t dim, const YarnScaling& scaling);

// Angles are rounded to fp32 before cos and sin, as published models were trained.
RopeTable make_rope_table(std::span<const double> inverse_frequencies, int64_t positions, double scale,
                          at::Device device);

// Throws unless the table is one for heads of `size`, and has a row for each of the positions (checked on the CPU).
void check_positions(const RopeTable& table, const at::Tensor& positions, int64_t tokens, int64_t size);

// Splits qkv into q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, D]; q and k are normed per head
// (statistics in fp32) and rotated, element i paired with i + D/2. v is a view of qkv's memory, so
// its row stride is (Hq + 2·Hkv)·D. Saves qkv; the backward writes one gradient of its shape, and
// adds into q_norm.grad and k_norm.grad, if defined, in a fixed order.
std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rope(const at::Tensor& qkv,  // [T, (Hq + 2·Hkv)·D] fp32 or bf16
                                                            const Parameter& q_norm,      // [D]
                                                            const Parameter& k_norm,      // [D]
                                                            const RopeTable& table,       // positions below P
                                                            const at::Tensor& positions,  // [T] int32
                                                            int64_t q_heads, int64_t kv_heads, double eps);

// The same without norms. Saves no activation.
std::tuple<at::Tensor, at::Tensor, at::Tensor> split_and_rotate(
    const at::Tensor& qkv,        // [T, (Hq + 2·Hkv)·D] fp32 or bf16
    const RopeTable& table,       // positions below P
    const at::Tensor& positions,  // [T] int32
    int64_t q_heads, int64_t kv_heads);

// Turns the first elements of each head, as many as the table has for both of its halves (partial RoPE), and leaves the
// others as they are. Plain tensor operations on any device.
at::Tensor rotate_front(const at::Tensor& heads,  // [T, h, D] fp32 or bf16, any strides
                        const RopeTable& table, const at::Tensor& positions);

}  // namespace marrow
