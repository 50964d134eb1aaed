#include "models/model_contract.h"

#include "models/config_fields.h"
#include "models/families.h"
#include "models/family_specs.h"
#include "ops/rms_norm.h"

namespace marrow {

std::vector<ParameterSpec> MoeModel::embedding_specs() const {
  const ModelShape& s = shape();
  return {matrix_spec("embedding", {s.vocab, s.hidden}, "model.embed_tokens.weight", s.initializer_range,
                      UpdateRule::kAdamW)};
}

std::vector<ParameterSpec> MoeModel::head_specs() const {
  const ModelShape& s = shape();
  const float factor = 1 - static_cast<float>(s.norm_offset);
  std::vector<ParameterSpec> specs{constant_spec("final_norm", {s.hidden}, "model.norm.weight", factor)};
  if (s.tied_embeddings) return specs;
  specs.push_back(matrix_spec("head", {s.vocab, s.hidden}, "lm_head.weight", s.initializer_range, UpdateRule::kAdamW));
  return specs;
}

at::Tensor MoeModel::final_norm(const at::Tensor& hidden, const ParameterTable& table) const {
  return rms_norm(hidden, table.at("final_norm"), shape().rms_norm_eps, shape().norm_offset);
}

RopeTable MoeModel::rope_table(at::Device device) const {
  return make_rope_table(shape().rope_frequencies, shape().max_position, shape().rope_scale, device);
}

double MoeModel::forward_flops_per_token(int64_t seq_len) const {
  const double head = 2.0 * static_cast<double>(shape().hidden * shape().vocab);
  double flops = head + mixing_flops_per_token(seq_len);
  for (int64_t layer = 0; layer < shape().layers; ++layer) {
    flops += product_flops_per_token(layer_specs(layer), shape());
  }
  return flops;
}

double product_flops_per_token(const std::vector<ParameterSpec>& specs, const ModelShape& shape) {
  double flops = 0;
  for (const ParameterSpec& spec : specs) {
    if (!spec.decay) continue;  // a vector, or a convolution's filters
    const double share = spec.expert ? static_cast<double>(shape.top_k) / static_cast<double>(shape.experts) : 1;
    for (const HubTensor& part : spec.parts) flops += 2 * share * static_cast<double>(part.elements());
  }
  return flops;
}

namespace {

std::unique_ptr<MoeModel> open_family(const Json& config) {
  const std::string type = config.at("model_type").as_string();
  if (type == "qwen3_moe") return open_qwen3_moe(config);
  if (type == "deepseek_v2" || type == "deepseek_v3") return open_deepseek_v2(config);
  if (type == "gpt_oss") return open_gpt_oss(config);
  if (type == "qwen3_5_moe" || type == "qwen3_5_moe_text") return open_qwen3_5_moe(language_model_config(config));
  config.at("model_type")
      .fail(fmt::format("unknown model family \"{}\"", type),
            Fix("use a config.json of model_type \"qwen3_moe\", \"deepseek_v2\", \"deepseek_v3\", \"gpt_oss\", "
                "\"qwen3_5_moe\" or \"qwen3_5_moe_text\""));
}

// Sizes that are possible each by itself may have products that no machine holds, nor 64 bits.
void check_elements(const Json& config, const std::vector<ParameterSpec>& specs) {
  constexpr double kMost = 1e12;
  for (const ParameterSpec& spec : specs) {
    double elements = 1;
    for (const int64_t size : spec.shape) elements *= static_cast<double>(size);
    if (elements <= kMost) continue;
    config.fail(fmt::format("parameter {} would have {} elements, more than {}", spec.name, elements, kMost),
                Fix("lower the model's sizes"));
  }
}

}  // namespace

std::unique_ptr<MoeModel> open_model(const Json& config) {
  auto model = open_family(config);
  for (const Json& part : {config, given(config, "text_config") ? config.at("text_config") : config}) {
    if (!given(part, "architectures")) continue;  // exports pass it on
    for (const Json& name : part.at("architectures").elements()) name.as_string();
  }
  check_elements(config, model->embedding_specs());
  for (int64_t layer = 0; layer < model->shape().layers; ++layer) check_elements(config, model->layer_specs(layer));
  return model;
}

Json language_model_config(const Json& config) {
  if (!config.has("text_config")) {
    if (config.at("model_type").as_string() == "qwen3_5_moe") {
      config.fail("\"qwen3_5_moe\" has its fields under text_config", Fix("set model_type to \"qwen3_5_moe_text\""));
    }
    return config;
  }
  refuse_quantised(config);
  const Json text = config.at("text_config");
  const std::string family = config.at("model_type").as_string() + "_text", tied = "tie_word_embeddings";
  if (text.string_or("model_type", family) != family) {
    text.at("model_type").fail("this is no " + family, Fix("set it to \"{}\"", family));
  }
  if (text.has(tied) && config.has(tied) && text.at(tied).as_bool() != config.at(tied).as_bool()) {
    text.at(tied).fail("the config around it says the opposite", Fix("set both to what the weights are"));
  }
  std::map<std::string, std::string> fields{{"model_type", json_text(family)}};
  if (config.has(tied)) fields[tied] = config.at(tied).dump();
  for (const auto& [key, value] : text.items()) fields.emplace(key, value.dump());
  JsonWriter out;
  for (const auto& [key, value] : fields) out.raw(key, value);
  return Json::parse(out.text(), config.origin() + ": text_config", ExitCode::kUsage);
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
