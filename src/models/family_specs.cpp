#include "models/family_specs.h"

namespace marrow {

ParameterSpec matrix_spec(std::string name, std::vector<int64_t> shape, std::string hub_name, double deviation,
                          UpdateRule rule) {
  ParameterSpec spec;
  spec.parts = {{std::move(hub_name), shape}};
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.rule = rule;
  spec.init_value = static_cast<float>(deviation);
  return spec;
}

ParameterSpec constant_spec(std::string name, std::vector<int64_t> shape, std::string hub_name, float value) {
  ParameterSpec spec = matrix_spec(std::move(name), std::move(shape), std::move(hub_name), value, UpdateRule::kAdamW);
  spec.decay = false;
  spec.init = InitKind::kConstant;
  return spec;
}

LayerSpecs::LayerSpecs(const ModelShape& model, int64_t layer)
    : model_(model), own_(fmt::format("layers.{}.", layer)), hub_("model." + own_) {}

ParameterSpec& LayerSpecs::matrix(const std::string& name, std::vector<int64_t> shape, const std::string& hub_name,
                                  UpdateRule rule) {
  return specs_.emplace_back(
      matrix_spec(own_ + name, std::move(shape), hub_ + hub_name, model_.initializer_range, rule));
}

ParameterSpec& LayerSpecs::constant(const std::string& name, std::vector<int64_t> shape, const std::string& hub_name,
                                    double value) {
  return specs_.emplace_back(constant_spec(own_ + name, std::move(shape), hub_ + hub_name, static_cast<float>(value)));
}

void LayerSpecs::norm(const std::string& name, int64_t size, const std::string& hub_name) {
  constant(name, {size}, hub_name, 1 - model_.norm_offset);
}

void LayerSpecs::stacked(const std::string& name, std::vector<HubTensor> parts) {
  std::vector<int64_t> shape = parts[0].shape;
  shape[0] = 0;
  for (HubTensor& part : parts) {
    part.name = hub_ + part.name;
    shape[0] += part.shape[0];
  }
  ParameterSpec& spec = shape.size() == 1 ? constant(name, shape, "", 0) : matrix(name, shape, "");
  spec.parts = std::move(parts);
}

void LayerSpecs::mlp(const std::string& name, const std::string& hub, int64_t inner) {
  const int64_t hidden = model_.hidden;
  stacked(name + ".gate_up",
          {{hub + ".gate_proj.weight", {inner, hidden}}, {hub + ".up_proj.weight", {inner, hidden}}});
  matrix(name + ".down", {hidden, inner}, hub + ".down_proj.weight");
}

void LayerSpecs::experts(const std::string& hub, int64_t inner) {
  std::vector<HubTensor> gate_up, down;
  for (int64_t e = 0; e < model_.experts; ++e) {
    const std::string expert = fmt::format("{}{}.{}.", hub_, hub, e);
    gate_up.push_back({expert + "gate_proj.weight", {inner, model_.hidden}});
    gate_up.push_back({expert + "up_proj.weight", {inner, model_.hidden}});
    down.push_back({expert + "down_proj.weight", {model_.hidden, inner}});
  }
  const auto add = [&](const char* name, int64_t rows, int64_t columns, std::vector<HubTensor> parts) {
    ParameterSpec& spec = matrix(name, {model_.experts, rows, columns}, "");
    spec.parts = std::move(parts);
    spec.expert = true;
  };
  add("experts.gate_up", 2 * inner, model_.hidden, std::move(gate_up));
  add("experts.down", model_.hidden, inner, std::move(down));
}

}  // namespace marrow
