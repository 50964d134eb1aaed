// config.json of every family: the model's sizes and parameters, and the config of its export, which is one of the same
// model. No tensor is made.
#include <cmath>

#include "fuzz/fuzz_target.h"
#include "models/hub_folder.h"
#include "models/model_contract.h"
#include "train/trainer_state.h"

namespace marrow {
namespace {

using namespace fuzz;  // NOLINT

// What a model says of itself, as text.
std::string summary(const MoeModel& model) {
  const ModelShape& shape = model.shape();
  std::string text = fmt::format("{} {} {} {} {} {}", shape.layers, shape.hidden, shape.vocab, shape.experts,
                                 shape.top_k, shape.dense_layers);
  std::vector<ParameterSpec> specs = model.embedding_specs();
  const auto append = [&](const std::vector<ParameterSpec>& more) {
    specs.insert(specs.end(), more.begin(), more.end());
  };
  if (shape.experts <= 512) append(model.layer_specs(0));
  if (shape.experts <= 512) append(model.layer_specs(shape.layers - 1));
  append(model.head_specs());
  for (const ParameterSpec& spec : specs) {
    int64_t elements = 1, parts = 0;
    for (const int64_t size : spec.shape) elements *= size;
    for (const HubTensor& part : spec.parts) parts += part.elements();
    require(elements == parts && elements > 0, "a parameter is its parts: " + spec.name);
    text += fmt::format(" {} {}", spec.name, elements);
  }
  for (const int64_t layer : {int64_t{0}, shape.layers - 1}) {
    const ActivationBytes bytes = model.activation_bytes(layer, 4);
    require(bytes.token > 0 && bytes.expert_row >= 0 && bytes.token_cheap <= bytes.token, "activations take memory");
  }
  if (shape.experts * shape.layers <= 4096) {
    const double flops = model.forward_flops_per_token(1 << 20);
    require(std::isfinite(flops) && flops > 0, "a token takes a positive number of operations");
  }
  return text;
}

void read(std::string_view text) {
  const Json config = Json::parse(text, "config.json", ExitCode::kUsage);
  const auto model = open_model(config);
  const std::string told = summary(*model);
  const std::string exported = hub_config(config, at::kFloat, 0);
  try {
    const Json again = Json::parse(exported, "exported", ExitCode::kUsage);
    require(summary(*open_model(again)) == told, "an export is of the same model");
    check_same_model(config, again);
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n{}", exported, error.to_text());
    require(false, "an export's config is accepted, as that of the same model");
  }
}

}  // namespace
}  // namespace marrow

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  marrow::fuzz::accepts([&] { marrow::read(marrow::fuzz::text_of(data, size)); });
  return 0;
}
