#include "models/config_fields.h"

#include "ops/cuda_kernels.h"

namespace marrow {
namespace {

// Numbers of either kind alike.
std::string text_of(const Json& value) { return value.is_number() ? json_number(value.as_double()) : value.dump(); }

}  // namespace

bool given(const Json& config, const char* key) { return config.has(key) && !config.at(key).is_null(); }

void refuse(const Json& value, const std::string& supported) {
  value.fail(fmt::format("{} is not supported for this family, {} is", value.dump(), supported),
             Fix("set it to {}", supported));
}

void check_is(const Json& config, const char* key, const std::string& supported) {
  if (!given(config, key)) return;
  const Json value = config.at(key);
  if (value.dump() != supported && text_of(value) != supported) refuse(value, supported);
}

void check_known(const Json& object, std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : object.items()) {
    if (std::ranges::find(known, key) != known.end() || value.is_null()) continue;
    value.fail("this option is not supported for this family", Fix("remove it, if the weights allow"));
  }
}

void check_within(const Json& config, const char* key, double value, double low, double high) {
  if (value >= low && value <= high) return;
  config.fail(fmt::format("{} = {} is not between {} and {}", key, value, low, high),
              Fix(fmt::format("set {} as the published models do", key)));
}

int64_t size_of(const Json& config, const char* key, double highest, double lowest) {
  check_within(config, key, config.at(key).as_double(), lowest, highest);
  return config.at(key).as_int();
}

void check_divides(const Json& config, const char* key, const char* by) {
  if (config.at(key).as_int() % config.at(by).as_int() == 0) return;
  config.at(by).fail(fmt::format("{} does not divide {} = {}", config.at(by).dump(), key, config.at(key).dump()),
                     Fix(fmt::format("set {} to a divisor of {}", by, key)));
}

void check_even(const Json& config, const char* key, int64_t size) {
  if (size % 2 == 0) return;
  config.fail(fmt::format("{} = {} is odd; RoPE turns pairs", key, size), Fix("set {} to an even number", key));
}

void refuse_quantised(const Json& config) {
  if (!given(config, "quantization_config")) return;
  config.at("quantization_config").fail("quantised weights are not supported", Fix("convert the model to bf16"));
}

ModelShape read_shape(const Json& config) {
  check_is(config, "hidden_act", "\"silu\"");
  check_is(config, "attention_dropout", "0");
  ModelShape shape;
  shape.layers = size_of(config, "num_hidden_layers", 1000);
  shape.hidden = size_of(config, "hidden_size");
  shape.vocab = size_of(config, "vocab_size");
  shape.max_position = size_of(config, "max_position_embeddings");
  shape.rms_norm_eps = config.at("rms_norm_eps").as_double();
  check_within(config, "rms_norm_eps", shape.rms_norm_eps, 1e-12, 0.1);
  shape.initializer_range = config.double_or("initializer_range", 0.02);
  check_within(config, "initializer_range", shape.initializer_range, 1e-9, 10);
  const char* coef = config.has("router_aux_loss_coef") ? "router_aux_loss_coef" : "aux_loss_alpha";
  shape.router_aux_loss_coef = config.double_or(coef, 1e-3);
  check_within(config, coef, shape.router_aux_loss_coef, 0, 1e3);
  shape.tied_embeddings = config.bool_or("tie_word_embeddings", false);
  return shape;
}

ModelShape read_moe_shape(const Json& config) {
  ModelShape shape = read_shape(config);
  shape.experts = size_of(config, config.has("num_experts") ? "num_experts" : "num_local_experts", kRouterMaxExperts);
  if (config.int_or("num_local_experts", shape.experts) != shape.experts) {
    refuse(config.at("num_local_experts"), fmt::format("num_experts = {}", shape.experts));
  }
  shape.top_k = size_of(config, "num_experts_per_tok", static_cast<double>(std::min(shape.experts, kRouterMaxTopK)));
  return shape;
}

std::vector<bool> read_layer_types(const Json& config, int64_t layers, const std::string& yes, const std::string& no) {
  const Json types = config.at("layer_types");
  if (static_cast<int64_t>(types.size()) != layers) {
    types.fail(fmt::format("{} entries for {} layers", types.size(), layers), Fix("give one entry a layer"));
  }
  std::vector<bool> is_yes;
  for (const Json& type : types.elements()) {
    is_yes.push_back(type.as_string() == yes);
    if (is_yes.back() || type.as_string() == no) continue;
    refuse(type, yes == no ? json_text(yes) : fmt::format("\"{}\" or \"{}\"", yes, no));
  }
  return is_yes;
}

Json rope_parameters(const Json& config) {
  std::map<std::string, Json> fields;
  const auto add = [&](const std::string& key, const Json& value) {
    if (value.is_null()) return;
    const auto [known, is_new] = fields.emplace(key == "type" ? "rope_type" : key, value);
    if (!is_new && text_of(value) != text_of(known->second)) {
      refuse(value, fmt::format("{}, as {} has it", known->second.dump(), known->second.path()));
    }
  };
  for (const char* style : {"rope_parameters", "rope_scaling"}) {
    if (!given(config, style)) continue;
    for (const auto& [key, value] : config.at(style).items()) add(key, value);
  }
  if (config.has("rope_theta") || !fields.contains("rope_theta")) add("rope_theta", config.at("rope_theta"));
  JsonWriter rope;
  for (const auto& [key, value] : fields) rope.raw(key, value.dump());
  const char* place = given(config, "rope_parameters") ? "rope_parameters" : "rope_scaling";  // for errors
  return Json::parse(rope.text(), fmt::format("{}: {}", config.origin(), place), ExitCode::kUsage);
}

YarnScaling read_yarn(const Json& rope) {
  YarnScaling yarn{rope.at("factor").as_double(), rope.at("original_max_position_embeddings").as_double(),
                   rope.double_or("beta_fast", 32), rope.double_or("beta_slow", 1), rope.bool_or("truncate", true)};
  check_within(rope, "factor", yarn.factor, 1, 1e6);
  check_within(rope, "original_max_position_embeddings", yarn.original_length, 1, 1 << 30);
  check_within(rope, "beta_fast", yarn.beta_fast, 1e-6, 1e6);
  check_within(rope, "beta_slow", yarn.beta_slow, 1e-6, 1e6);
  return yarn;
}

double yarn_magnitude(const YarnScaling& yarn, double mscale) { return 0.1 * mscale * std::log(yarn.factor) + 1; }

}  // namespace marrow
