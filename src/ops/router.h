// The router of a mixture of experts: logits, probabilities, the chosen experts and their weights,
// and the statistics and gradient of the balance losses.
#pragma once
#include "ops/parameter.h"

namespace marrow {

struct RouterOptions {
  int64_t top_k = 1;
  bool normalize = true;  // norm_topk_prob: the k weights of a token sum to `scale`
  double scale = 1.0;     // routed_scaling_factor
  bool forced = false;    // pair (t, j) goes to expert (t·k + j) mod E whatever the logits
  bool sigmoid = false;   // scores are sigmoid(logits), and probabilities scores / Σ scores; else both softmax(logits)
  // Experts are chosen from the best `top_groups` of `expert_groups` equal groups of neighbours (n_group, topk_group);
  // a group is as good as its best expert, with sigmoid as its best two together.
  int64_t expert_groups = 1, top_groups = 1;
  Parameter bias = {};  // [E] in x's dtype, added to the logits; its value undefined: none
};

// What the objective adds to the router's gradient. The engine fills it in after the forward and
// before the backward, when the statistics of the whole (micro-)batch are known.
struct RouterBalance {
  at::Tensor gradient;         // [G, E] fp32: d objective / d probability of each token of group g;
                               // undefined: none. See balance_gradient
  double z_loss_gradient = 0;  // z-loss coefficient / tokens of the global batch
};

struct RouterOutput {
  at::Tensor experts;           // [T, k] int32, by falling score; equal ones by lower id
  at::Tensor weights;           // [T, k] fp32, differentiable
  at::Tensor counts;            // [G, E] int32: (token, expert) pairs of group g
  at::Tensor probability_sums;  // [G, E] fp32: sum over the group's tokens of their probabilities
  at::Tensor z_sum;             // [1] fp32: sum over all tokens of logsumexp(logits)²
};

// x [T, H] fp32 or bf16, weight [E, H] in x's dtype; computes in fp32. Group g holds the tokens [g·T/G, (g+1)·T/G), for
// statistics per sequence. `selection_bias` [E] fp32 (or undefined) is added to the scores for the choice alone.
// The weight's gradient goes through `queue`. k ≤ 32.
RouterOutput router(const at::Tensor& x, const Parameter& weight, const at::Tensor& selection_bias, int64_t groups,
                    const RouterOptions& options, std::shared_ptr<RouterBalance> balance, WeightGradQueue& queue);

// Share of the chosen pairs that went to each expert: [G, E] counts (any dtype) → [G, E] fp32, rows sum to 1.
at::Tensor expert_fractions(const at::Tensor& counts, int64_t tokens_per_group, int64_t top_k);

// E · Σ_i f_i · P_i of each group, [G] fp32: 1 is balanced, E is all on one expert (Hugging Face's
// value is k times this). counts and probability_sums are [G, E].
at::Tensor balance_loss(const at::Tensor& counts, const at::Tensor& probability_sums, int64_t tokens_per_group,
                        int64_t top_k);

// d (coefficient · E · Σ f_i · P_i) / d probability of one token, for RouterBalance::gradient: f [G, E] fp32 has no
// gradient, and P is a mean over `tokens`. Statistics per sequence: tokens is the sequence's length, coefficient is
// coef / sequences. A whole batch: [1, E] and its tokens; it may be expanded to [G, E].
at::Tensor balance_gradient(const at::Tensor& fractions, int64_t tokens, double coefficient);

}  // namespace marrow
