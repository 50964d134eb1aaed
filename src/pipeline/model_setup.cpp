#include "pipeline/model_setup.h"

namespace marrow {

void add_model_parameters(const MoeModel& model, ParameterStore& store) {
  store.add("embedding", model.embedding_specs());
  for (int64_t layer = 0; layer < model.shape().layers; ++layer) {
    store.add(fmt::format("layers.{}", layer), model.layer_specs(layer));
  }
  store.add("head", model.head_specs());
}

}  // namespace marrow
