// The parameters that families have alike.
#pragma once
#include "ops/parameter_spec.h"

namespace marrow {

// A matrix of normal values with this deviation; one tensor of the Hub, unless its parts are set after.
ParameterSpec matrix_spec(std::string name, std::vector<int64_t> shape, std::string hub_name, double deviation);

// What weight decay and Muon leave alone, norms and biases above all; constant at first.
ParameterSpec constant_spec(std::string name, std::vector<int64_t> shape, std::string hub_name, float value);

// Embedding, head, routers and gates: AdamW updates them under Muon, too.
ParameterSpec adamw(ParameterSpec spec);

// OWNgate_up [2I, H] and OWNdown [H, I] of an MLP. `expert`: [E, 2I, H] and [E, H, I], of those that `hubs` name.
void add_mlp_specs(std::vector<ParameterSpec>& specs, const std::string& own, const std::vector<std::string>& hubs,
                   int64_t hidden, int64_t inner, bool expert, double deviation);

}  // namespace marrow
