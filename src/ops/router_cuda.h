#pragma once
#include <cstdint>

namespace marrow {

constexpr int64_t kRouterMaxExperts = 512;
constexpr int64_t kRouterMaxTopK = 32;

// Sizes of a router call: tokens T in `groups` equal groups.
struct RouterShape {
  int64_t tokens, experts, top_k, groups;
  bool normalize, forced;
  float scale;
};

// Blocks of each group, all groups alike: partial_sums below has groups · this rows.
int64_t router_blocks_per_group(const RouterShape& shape);

// probabilities [T, E] holds logits on entry. selection_bias [E] or null. lse [T], counts [G, E]
// zeroed, partial_sums [G · blocks, E + 1] scratch; the rest as in RouterOutput.
void router_forward_cuda(const RouterShape& shape, float* probabilities,
                         const float* selection_bias, float* lse, int32_t* experts, float* weights,
                         int32_t* counts, float* partial_sums, float* probability_sums,
                         float* z_sum, void* stream);

// d_weights [T, k] or null; balance_gradient [G, E] or null. d_logits: fp32 [T, E], or where
// split is given bf16 [T, 2E]: rounded values in the first E columns, what rounding lost in the
// rest.
void router_backward_cuda(const RouterShape& shape, const float* probabilities, const float* lse,
                          const int32_t* experts, const float* weights, const float* d_weights,
                          const float* balance_gradient, float z_loss_gradient, float* d_logits,
                          void* split, void* stream);

}  // namespace marrow
