#include "models/model_contract.h"

#include "models/deepseek_v2.h"
#include "models/gpt_oss.h"
#include "models/qwen3_moe.h"

namespace marrow {

std::unique_ptr<MoeModel> open_model(const Json& config) {
  const std::string type = config.at("model_type").as_string();
  if (type == "qwen3_moe") return open_qwen3_moe(config);
  if (type == "deepseek_v2" || type == "deepseek_v3") return open_deepseek_v2(config);
  if (type == "gpt_oss") return open_gpt_oss(config);
  config.at("model_type")
      .fail(fmt::format("unknown model family \"{}\"", type),
            Fix("use a config.json of model_type \"qwen3_moe\", \"deepseek_v2\", \"deepseek_v3\" or \"gpt_oss\""));
}

std::vector<ParameterSpec> all_parameter_specs(const MoeModel& model) {
  std::vector<ParameterSpec> specs = model.embedding_specs();
  const auto append = [&](std::vector<ParameterSpec> more) {
    std::move(more.begin(), more.end(), std::back_inserter(specs));
  };
  for (int64_t layer = 0; layer < model.shape().layers; ++layer) append(model.layer_specs(layer));
  append(model.head_specs());
  return specs;
}

std::vector<HubTensor> all_hub_tensors(const MoeModel& model) {
  std::vector<HubTensor> tensors;
  for (const ParameterSpec& spec : all_parameter_specs(model)) {
    tensors.insert(tensors.end(), spec.parts.begin(), spec.parts.end());
  }
  const std::vector<HubTensor>& biases = model.shape().selection_biases;
  tensors.insert(tensors.end(), biases.begin(), biases.end());
  return tensors;
}

}  // namespace marrow
