#include "models/family_specs.h"

#include <utility>

namespace marrow {

ParameterSpec matrix_spec(std::string name, std::vector<int64_t> shape, std::string hub_name, double deviation) {
  ParameterSpec spec;
  spec.parts = {{std::move(hub_name), shape}};
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.init_value = static_cast<float>(deviation);
  return spec;
}

ParameterSpec constant_spec(std::string name, std::vector<int64_t> shape, std::string hub_name, float value) {
  ParameterSpec spec = matrix_spec(std::move(name), std::move(shape), std::move(hub_name), value);
  spec.rule = UpdateRule::kAdamW;
  spec.decay = false;
  spec.init = InitKind::kConstant;
  return spec;
}

ParameterSpec adamw(ParameterSpec spec) {
  spec.rule = UpdateRule::kAdamW;
  return spec;
}

void add_mlp_specs(std::vector<ParameterSpec>& specs, const std::string& own, const std::vector<std::string>& hubs,
                   int64_t hidden, int64_t inner, bool expert, double deviation) {
  ParameterSpec gate_up = matrix_spec(own + "gate_up", {2 * inner, hidden}, "", deviation);
  ParameterSpec down = matrix_spec(own + "down", {hidden, inner}, "", deviation);
  gate_up.parts.clear();
  down.parts.clear();
  for (const std::string& hub : hubs) {
    gate_up.parts.push_back({hub + "gate_proj.weight", {inner, hidden}});
    gate_up.parts.push_back({hub + "up_proj.weight", {inner, hidden}});
    down.parts.push_back({hub + "down_proj.weight", {hidden, inner}});
  }
  for (ParameterSpec* spec : {&gate_up, &down}) {
    spec->expert = expert;
    if (expert) spec->shape.insert(spec->shape.begin(), static_cast<int64_t>(hubs.size()));
    specs.push_back(std::move(*spec));
  }
}

}  // namespace marrow
