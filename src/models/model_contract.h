// What a model family supplies to the engine, and what the engine hands it.
//
// A decoder layer is five stages, cut where tokens move between ranks:
//   S1 attention, router   S2 dispatch   S3 experts   S4 combine   S5 sum, residual
// A family writes S1, S3 and S5; the engine owns S2 and S4 (pipeline/layer_pass.h).
#pragma once
#include "base/json.h"
#include "ops/attention.h"
#include "ops/parameter.h"
#include "ops/parameter_spec.h"
#include "ops/pch.h"
#include "ops/qk_norm_rope.h"
#include "ops/recompute.h"
#include "ops/router.h"
#include "ops/rows.h"

namespace marrow {

class Communicator;
class KeyValueCache;

// Parameters by ParameterSpec::name.
using ParameterTable = std::map<std::string, Parameter, std::less<>>;

// The numbers of a model that the engine needs, whatever the family.
struct ModelShape {
  int64_t layers = 0;
  int64_t hidden = 0;  // H
  int64_t vocab = 0;   // V, rows of the embedding: may exceed the tokenizer's
  int64_t max_position = 0;
  std::vector<double> rope_frequencies = {};  // [D/2], of RoPE's pairs; fewer where only a part of each head turns
  double rope_scale = 1;                      // of cos and sin
  int64_t experts = 0;                        // E
  int64_t top_k = 0;                          // k
  double rms_norm_eps = 1e-6;
  double norm_offset = 0;  // what norms add to their weights: 1 where these say how far a factor is from 1
  double initializer_range = 0.02;
  double router_aux_loss_coef = 1e-3;  // coef of the balance loss unless [router] sets it
  bool tied_embeddings = false;
  int64_t dense_layers = 0;  // the first ones: no router and no experts, S1 and S5 alone
  // A bias of selection [E] for each MoE layer, where the format stores them: kept by the engine, not trained.
  std::vector<HubTensor> selection_biases = {};

  int64_t moe_layers() const { return layers - dense_layers; }
};

// What one micro-batch needs in every layer.
struct LayerContext {
  AttentionLayout attention;   // sequences, documents; whole, also where a context group splits them
  at::Tensor positions;        // [T] int32, within the sequence (or document, where masked)
  RopeTable rope;              // MoeModel::rope_table
  int64_t balance_groups = 1;  // G: groups of consecutive tokens whose router statistics are apart
  bool forced_routing = false;
  bool deterministic = false;
  at::Tensor selection_bias;               // [E] fp32 of this layer, or undefined
  std::shared_ptr<RouterBalance> balance;  // the balance term's gradient, set after S1's forward
  WeightGradQueue* weight_grads = nullptr;
  Communicator* context_ring = nullptr;  // context group, keys and values go round it; none: cp = 1
  KeyValueCache* cache = nullptr;        // generation: layers read and extend it
  RecomputeList* recompute = nullptr;    // train.recompute = "cheap": a stage adds what its backward makes again
};

// What S1 gives.
struct RoutedTokens {
  at::Tensor residual;   // [T, H]
  at::Tensor normed;     // [T, H], what the experts read
  RouterOutput routing;  // experts and weights of each token, and the router's statistics; undefined in a dense layer
};

class DecoderLayer {
 public:
  virtual ~DecoderLayer() = default;
  // S1. hidden [T, H].
  virtual RoutedTokens attend_and_route(const at::Tensor& hidden, const LayerContext&) const = 0;
  // The weight whose product is the first to read S3's rows.
  virtual const Parameter& first_expert_weight() const = 0;
  // S3. rows [R, H] sorted by expert, row_weights [R] fp32. Returns [R, H], each row multiplied by its weight.
  virtual ExpertRows run_experts(const ExpertRows& rows, const at::Tensor& row_weights, const LayerContext&) const = 0;
  // S5. residual and normed as S1 gave them, rows [R, H] of S4 with the map from tokens to rows (none in a dense
  // layer); its result must not share the rows' memory, nor its backward read it: it is gone afterwards.
  virtual at::Tensor combine_and_add(const at::Tensor& residual, const at::Tensor& normed, const ExpertRows& rows,
                                     const RowMap& map, const LayerContext&) const = 0;
};

// Memory of a layer's operators, for `marrow estimate`: bytes for each token, and for each row of experts, in S3.
struct ActivationBytes {
  int64_t token = 0, expert_row = 0;                    // from forward to backward; inputs included, S3's result not
  int64_t token_cheap = 0, expert_row_cheap = 0;        // of these, what train.recompute = "cheap" makes again
  int64_t token_backward = 0, expert_row_backward = 0;  // the most besides, while S1's or S3's backward runs
  // Besides, where a context group splits sequences: while S1's backward runs; from forward to backward, for each token
  // and for each chunk of a sequence (2 · cp), which a gradient matches while S1's backward runs.
  int64_t token_ring = 0, token_ring_kept = 0, chunk_ring_kept = 0;
};

class MoeModel {
 public:
  virtual ~MoeModel() = default;
  virtual const ModelShape& shape() const = 0;
  virtual std::vector<ParameterSpec> layer_specs(int64_t layer) const = 0;
  virtual std::unique_ptr<DecoderLayer> make_layer(int64_t layer, const ParameterTable&) const = 0;
  // Operations of one token's forward that are no products with weights, of all layers: attention (half), recurrences.
  virtual double mixing_flops_per_token(int64_t seq_len) const = 0;
  // `element`: bytes of an activation's element.
  virtual ActivationBytes activation_bytes(int64_t layer, int64_t element) const = 0;

  // Both ends, alike in all families.
  std::vector<ParameterSpec> embedding_specs() const;  // "embedding"
  std::vector<ParameterSpec> head_specs() const;       // "final_norm", "head" unless tied
  // Normalises the last layer's output [T, H] before the head.
  at::Tensor final_norm(const at::Tensor& hidden, const ParameterTable&) const;
  RopeTable rope_table(at::Device device) const;  // of all positions
  double forward_flops_per_token(int64_t seq_len) const;
};

// Floating-point operations of one token's products with these weights, the experts' that it does not choose left out.
double product_flops_per_token(const std::vector<ParameterSpec>& specs, const ModelShape& shape);

// The family of a Hugging Face config.json, decided by its model_type. Every option that the family
// has but marrow lacks is an error (kUsage) that names it.
std::unique_ptr<MoeModel> open_model(const Json& config);

// The fields under text_config, where a config has them there, with the whole's tied embeddings; else `config` itself.
Json language_model_config(const Json& config);

// Every tensor of the model in canonical order: embedding, layers, head; then, of the Hub's, the biases of selection.
std::vector<ParameterSpec> all_parameter_specs(const MoeModel&);
std::vector<HubTensor> all_hub_tensors(const MoeModel&);

}  // namespace marrow
