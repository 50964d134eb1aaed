#include "train/trainer_state.h"

#include <fmt/ranges.h>

#include <set>

#include "models/config_fields.h"
#include "models/hub_folder.h"

namespace marrow {
namespace {

// weights_of: whose weights a run of its own begins with; empty: it goes on.
void check_equal(std::string_view key, const std::string& saved, const std::string& current,
                 const std::string& weights_of = "") {
  const auto shown = [](const std::string& value) { return value.empty() ? "absent" : value; };
  const std::string change = saved.empty() ? fmt::format("remove {}", key) : fmt::format("set {} to {}", key, saved);
  MARROW_CHECK(saved == current || weights_of.empty(), ExitCode::kUsage,
               Fix("{}, or edit config.json in a copy of that folder", change),
               "{} is {}, but in the config.json of {} {}", key, shown(current), weights_of, shown(saved));
  MARROW_CHECK(saved == current, ExitCode::kUsage, Fix("{}, or start a run of its own with another log.dir", change),
               "cannot resume: {} is {}, but the checkpoint was saved with {}", key, shown(current), shown(saved));
}

// What RoPE does beyond rope_theta, in either of the Hub's styles.
std::string rope_scaling_text(const Json& config) {
  std::map<std::string, std::string> fields;
  if (config.has("partial_rotary_factor")) {  // that of rope_parameters counts more
    fields["partial_rotary_factor"] = json_number(config.at("partial_rotary_factor").as_double());
  }
  for (const auto& [key, value] : rope_parameters(config).items()) {
    if (key == "rope_theta" || (key == "rope_type" && value.as_string() == "default")) continue;
    fields[key] = value.is_number() ? json_number(value.as_double()) : value.dump();
  }
  return fmt::format("{}", fields);
}

// The value of a field as text; "" where it is absent. The Hub's two styles name some differently.
std::string field_text(const Json& config, const std::string& key) {
  if (key == "num_experts" && !config.has(key)) return field_text(config, "num_local_experts");
  if (key == "rope_theta" && !config.has(key)) {
    return config.has("rope_parameters") ? field_text(config.at("rope_parameters"), key) : "";
  }
  if (key == "rope_scaling") return rope_scaling_text(config);
  if (!config.has(key)) return "";
  const Json value = config.at(key);
  return value.is_number() ? json_number(value.as_double()) : value.dump();
}

// Calls visit(key, member) for every field of trainer_state.json.
template <typename State, typename Visit>
void each_field(State& state, Visit visit) {
  visit("step", state.step);
  visit("consumed_sequences", state.consumed_sequences);
  visit("skipped_steps", state.skipped_steps);
  visit("seed", state.seed);
  visit("seq_len", state.seq_len);
  visit("mask_documents", state.mask_documents);
  visit("corpus", state.corpus);
  visit("tokenizer", state.tokenizer);
  visit("tokenizer_hash", state.tokenizer_hash);
  visit("end_of_document", state.end_of_document);
  visit("optimizer", state.optimizer);
  visit("state_dtype", state.state_dtype);
}

void read_value(const Json& json, int64_t& value) { value = json.as_int(); }
void read_value(const Json& json, bool& value) { value = json.as_bool(); }
void read_value(const Json& json, std::string& value) { value = json.as_string(); }

}  // namespace

void check_same_model(const Json& saved_config, const Json& current_config, const std::string& weights_of) {
  // As an export writes them: with the defaults, and in both styles.
  const auto exported = [](const Json& config) {
    return Json::parse(hub_config(config, at::kFloat, -1), config.origin());
  };
  const Json saved = exported(saved_config), current = exported(current_config);
  // Fields that say how the file was written, not what the model computes.
  std::set<std::string, std::less<>> ignored{
      "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures", "output_router_logits",
      "eos_token_id", "bos_token_id", "pad_token_id", "_name_or_path", "num_nextn_predict_layers", "num_mtp_layers",
      "mtp_num_hidden_layers", "max_window_layers", "pretraining_tp", "initializer_range",
      // Of these, two keys below say the same.
      "rope_parameters", "partial_rotary_factor"};
  if (!weights_of.empty()) {  // what the new run trains with, and how far its positions go
    ignored.insert({"router_aux_loss_coef", "aux_loss_alpha"});
    const char* positions = "max_position_embeddings";
    if (current.at(positions).as_int() >= saved.at(positions).as_int()) ignored.insert(positions);
  }
  std::set<std::string> keys{"rope_theta", "rope_scaling", "num_experts"};
  for (const Json& config : {saved, current}) {
    for (const auto& [key, value] : config.items()) keys.insert(key);
  }
  for (const std::string& key : keys) {
    // Of a field that only one style has, num_experts above says the same.
    const bool one_style = key == "num_local_experts";
    if (ignored.contains(key) || (one_style && !(saved.has(key) && current.has(key)))) continue;
    check_equal(key + " of model.config", field_text(saved, key), field_text(current, key), weights_of);
  }
}

std::string to_json(const TrainerState& state) {
  JsonWriter json;
  each_field(state, [&](const char* key, const auto& value) { json.field(key, value); });
  return json.text();
}

TrainerState parse_trainer_state(const Json& json) {
  TrainerState state;
  each_field(state, [&](const char* key, auto& value) { read_value(json.at(key), value); });
  for (const char* key : {"step", "consumed_sequences", "skipped_steps", "seq_len"}) {
    const int64_t value = json.at(key).as_int();
    if (value >= 0 && value <= int64_t{1} << 50) continue;
    json.at(key).fail(fmt::format("{} is out of range", value), Fix("use another checkpoint"));
  }
  return state;
}

void check_resumable(const TrainerState& saved, const Json& saved_config, const TrainerState& current,
                     const Json& current_config) {
  const auto check = [](const char* key, const auto& before, const auto& now) {
    check_equal(key, fmt::format("{}", before), fmt::format("{}", now));
  };
  check_same_model(saved_config, current_config);
  check("data.seq_len", saved.seq_len, current.seq_len);
  check("train.seed", saved.seed, current.seed);
  check("data.mask_documents", saved.mask_documents, current.mask_documents);
  check("the tokenizer of data.train", saved.tokenizer_hash, current.tokenizer_hash);
  check("the corpus of data.train", saved.corpus, current.corpus);
  check("optimizer.name", saved.optimizer, current.optimizer);
  check("optimizer.state_dtype", saved.state_dtype, current.state_dtype);
}

}  // namespace marrow
