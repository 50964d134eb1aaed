#include "pipeline/model_setup.h"

#include "models/hub_folder.h"

namespace marrow {

LayerRange ModelParts::layers(int64_t slot, const ModelShape& shape) const {
  if (chunk_layers.empty()) return {0, shape.layers};
  return chunk_layers[static_cast<size_t>(pipeline.chunk_at(pipeline_rank, slot))];
}

void add_model_parameters(const MoeModel& model, const ModelParts& parts, ParameterStore& store) {
  for (int64_t slot = 0; slot < parts.pipeline.slots(); ++slot) {
    if (parts.embeds(slot)) store.add("embedding", model.embedding_specs());
    const auto [first, last] = parts.layers(slot, model.shape());
    for (int64_t layer = first; layer < last; ++layer) {
      store.add(fmt::format("layers.{}", layer), model.layer_specs(layer));
    }
    if (parts.has_head(slot)) store.add("head", model.head_specs());
  }
}

void load_weights(const MoeModel& model, const std::string& folder, ParameterStore& store,
                  const at::Tensor& selection_bias) {
  const ModelWeights weights(folder, all_hub_tensors(model), {.tied_embeddings = model.shape().tied_embeddings});
  for (const OwnedRange& range : store.owned_ranges()) weights.read(*range.tensor, range.begin, range.master);
  const std::vector<HubTensor>& biases = model.shape().selection_biases;
  for (size_t i = 0; i < biases.size(); ++i) weights.read(biases[i], 0, selection_bias[static_cast<int64_t>(i)]);
  store.copy_masters_to_working();
}

}  // namespace marrow
