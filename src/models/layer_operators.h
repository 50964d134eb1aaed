// Operators of a layer together with what its context wants of them: the cache of generation, the ranks that share a
// sequence, weight gradients put off, activations made again.
#pragma once
#include "models/model_contract.h"

namespace marrow {

// The parameters of a layer by their own names: "qkv" is "layers.3.qkv" in the table.
struct LayerParameters {
  const ParameterTable& table;
  int64_t layer;

  Parameter operator()(std::string_view name) const;
  Parameter if_any(std::string_view name) const;  // undefined where this layer has none
};

// make(), which train.recompute = "cheap" makes again for the backward, unless only `reader` reads it, and in fp8.
at::Tensor cheap(const LayerContext& context, const std::function<at::Tensor()>& make, const Parameter& reader = {});

// The same of queries and keys; values are a view of what they were made of.
using Heads = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]
Heads cheap_heads(const LayerContext& context, const std::function<Heads()>& make);

// Causal attention of layer `layer`, also over the tokens generated before; sinks and window as attention() has them.
at::Tensor attend(const LayerContext& context, int64_t layer,
                  const at::Tensor& q,  // [T, Hq, D]
                  const at::Tensor& k,  // [T, Hkv, D]
                  const at::Tensor& v,  // [T, Hkv, Dv] → [T, Hq, Dv]
                  double scale, int64_t window = 0, const Parameter& sinks = {});

// The router on what the experts read, [T, H].
RouterOutput route(const LayerContext& context, const at::Tensor& normed, const Parameter& weight,
                   RouterOptions options);

// down · swiglu(gate_up · x), of x [T, H] → [T, H].
at::Tensor swiglu_mlp(const LayerContext& context, const at::Tensor& x,
                      const Parameter& gate_up,  // [2I, H], gate before up
                      const Parameter& down);    // [H, I]

// The same of each expert, as DecoderLayer::run_experts.
ExpertRows swiglu_experts(const LayerContext& context, const ExpertRows& rows, const at::Tensor& row_weights,
                          const Parameter& gate_up,  // [E, 2I, H], each expert's gate before its up
                          const Parameter& down);    // [E, H, I]
// What that needs of memory for each row, I = `inner`, into `bytes`.
void count_swiglu_experts(ActivationBytes& bytes, int64_t element, int64_t hidden, int64_t inner);

}  // namespace marrow
