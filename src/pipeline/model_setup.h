// A model with its parameters, as training, evaluation and generation set it up.
#pragma once
#include "models/model_contract.h"
#include "parallel/parameter_store.h"

namespace marrow {

// Adds every parameter of the model: a group for the embedding, each layer, and the head.
void add_model_parameters(const MoeModel& model, ParameterStore& store);

}  // namespace marrow
