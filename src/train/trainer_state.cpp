#include "train/trainer_state.h"

#include <set>

namespace marrow {
namespace {

void check_equal(std::string_view key, const std::string& saved, const std::string& current) {
  MARROW_CHECK(saved == current, ExitCode::kUsage,
               Fix(fmt::format("set {} back to {}, or start a run of its own with another "
                               "checkpoint.dir",
                               key, saved)),
               "cannot resume: {} is {}, but the checkpoint was saved with {}", key, current,
               saved);
}

// The value of a field as text; "" where it is absent. The Hub's two styles name some differently.
std::string field_text(const Json& config, const std::string& key) {
  if (key == "num_experts" && !config.has(key)) return field_text(config, "num_local_experts");
  if (key == "rope_theta" && !config.has(key)) {
    return config.has("rope_parameters") ? field_text(config.at("rope_parameters"), key) : "";
  }
  if (!config.has(key)) return "";
  const Json value = config.at(key);
  return value.is_number() ? json_number(value.as_double()) : value.dump();
}

void check_same_model(const Json& saved, const Json& current) {
  // Fields that say how the file was written, not what the model computes.
  const std::set<std::string> ignored{"transformers_version",
                                      "torch_dtype",
                                      "dtype",
                                      "use_cache",
                                      "architectures",
                                      "_name_or_path",
                                      "output_router_logits",
                                      "eos_token_id",
                                      "bos_token_id",
                                      "pad_token_id"};
  std::set<std::string> keys{"rope_theta", "num_experts"};
  for (const Json& config : {saved, current}) {
    for (const std::string& key : config.keys()) keys.insert(key);
  }
  for (const std::string& key : keys) {
    // Of the fields that only one style has, num_experts and rope_theta above say the same.
    const bool one_style = key == "num_local_experts" || key == "rope_parameters";
    if (ignored.contains(key) || (one_style && !(saved.has(key) && current.has(key)))) continue;
    check_equal(key + " of model.config", field_text(saved, key), field_text(current, key));
  }
}

}  // namespace

std::string to_json(const TrainerState& state) {
  return JsonWriter()
      .field("step", state.step)
      .field("consumed_sequences", state.consumed_sequences)
      .field("skipped_steps", state.skipped_steps)
      .field("seed", state.seed)
      .field("seq_len", state.seq_len)
      .field("mask_documents", state.mask_documents)
      .field("corpus", state.corpus)
      .field("tokenizer", state.tokenizer)
      .field("tokenizer_hash", state.tokenizer_hash)
      .field("end_of_document", state.end_of_document)
      .field("optimizer", state.optimizer)
      .field("state_dtype", state.state_dtype)
      .text();
}

TrainerState parse_trainer_state(const Json& json) {
  TrainerState state;
  state.step = json.at("step").as_int();
  state.consumed_sequences = json.at("consumed_sequences").as_int();
  state.skipped_steps = json.at("skipped_steps").as_int();
  state.seed = json.at("seed").as_int();
  state.seq_len = json.at("seq_len").as_int();
  state.mask_documents = json.at("mask_documents").as_bool();
  state.corpus = json.at("corpus").as_string();
  state.tokenizer = json.at("tokenizer").as_string();
  state.tokenizer_hash = json.at("tokenizer_hash").as_string();
  state.end_of_document = json.at("end_of_document").as_int();
  state.optimizer = json.at("optimizer").as_string();
  state.state_dtype = json.at("state_dtype").as_string();
  return state;
}

void check_resumable(const TrainerState& saved, const Json& saved_config,
                     const TrainerState& current, const Json& current_config) {
  const auto text = [](auto value) { return fmt::format("{}", value); };
  check_same_model(saved_config, current_config);
  check_equal("data.seq_len", text(saved.seq_len), text(current.seq_len));
  check_equal("train.seed", text(saved.seed), text(current.seed));
  check_equal("data.mask_documents", text(saved.mask_documents), text(current.mask_documents));
  check_equal("the tokenizer of data.train", saved.tokenizer_hash, current.tokenizer_hash);
  check_equal("the corpus of data.train", saved.corpus, current.corpus);
  check_equal("optimizer.name", saved.optimizer, current.optimizer);
  check_equal("optimizer.state_dtype", saved.state_dtype, current.state_dtype);
}

}  // namespace marrow
