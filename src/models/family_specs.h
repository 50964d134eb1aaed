// The parameters that families have alike.
#pragma once
#include "models/model_contract.h"

namespace marrow {

// A matrix of normal values with this deviation; one tensor of the Hub. rule kAdamW: for embedding, head, routers and
// gates, which Muon must not update.
ParameterSpec matrix_spec(std::string name, std::vector<int64_t> shape, std::string hub_name, double deviation,
                          UpdateRule rule = UpdateRule::kMuon);

// What weight decay and Muon leave alone, norms and biases above all; constant at first.
ParameterSpec constant_spec(std::string name, std::vector<int64_t> shape, std::string hub_name, float value);

// The parameters of a layer, in the order of the calls; what one returns may be changed until the next. Names are
// without "layers.3.", those of the Hub without "model.layers.3.".
class LayerSpecs {
 public:
  LayerSpecs(const ModelShape& model, int64_t layer);

  ParameterSpec& matrix(const std::string& name, std::vector<int64_t> shape, const std::string& hub_name,
                        UpdateRule rule = UpdateRule::kMuon);
  ParameterSpec& constant(const std::string& name, std::vector<int64_t> shape, const std::string& hub_name,
                          double value);
  void norm(const std::string& name, int64_t size, const std::string& hub_name);  // whose factor is 1 at first
  // Rows of several tensors of the Hub, one below the other: of matrices, or of vectors that are 0 at first.
  void stacked(const std::string& name, std::vector<HubTensor> parts);
  // NAME.gate_up [2I, H] and NAME.down [H, I] of an MLP; those of all experts, HUB.0, HUB.1, …, by [E, 2I, H], [E, H,
  // I].
  void mlp(const std::string& name, const std::string& hub, int64_t inner);
  void experts(const std::string& hub, int64_t inner);
  std::vector<ParameterSpec> take() { return std::move(specs_); }

 private:
  const ModelShape& model_;
  std::string own_, hub_;  // what the names begin with
  std::vector<ParameterSpec> specs_;
};

}  // namespace marrow
