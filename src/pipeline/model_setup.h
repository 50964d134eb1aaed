// What a rank holds and runs of a model, and with which ranks it exchanges.
#pragma once
#include "models/model_contract.h"
#include "parallel/parameter_store.h"
#include "pipeline/layer_placement.h"

namespace marrow {

// A rank's place in the pipeline and its partners; the default is one rank that holds all.
struct ModelParts {
  PipelineShape pipeline;
  int64_t pipeline_rank = 0;
  std::vector<LayerRange> chunk_layers;  // of the whole pipeline (place_layers); empty: one chunk
  // One directed link each (parallel/mesh_communicators.h), null at the pipeline's ends.
  Communicator *to_next = nullptr, *from_previous = nullptr, *to_previous = nullptr, *from_next = nullptr;
  Communicator* experts = nullptr;  // null: this rank holds all experts
  Communicator* context = nullptr;  // shares sequences; null: this rank has whole ones

  LayerRange layers(int64_t slot, const ModelShape& shape) const;
  bool embeds(int64_t slot) const { return pipeline.chunk_at(pipeline_rank, slot) == 0; }
  bool has_head(int64_t slot) const { return pipeline.chunk_at(pipeline_rank, slot) == pipeline.chunks() - 1; }
};

// Adds the parameters of the rank's chunks: a group for the embedding, each layer, and the head.
void add_model_parameters(const MoeModel& model, const ModelParts& parts, ParameterStore& store);

// Fills what this rank holds of the weights from a folder of safetensors, a checkpoint or a Hub folder, and then the
// working copies; and the biases of selection, [MoE layers, E] fp32, where the model has them. Collective. Errors
// (kBadInput) unless the files hold exactly the model's tensors.
void load_weights(const MoeModel& model, const std::string& folder, ParameterStore& store,
                  const at::Tensor& selection_bias);

}  // namespace marrow
