// What a run must remember beside tensors, and which of it a resume may change.
#pragma once
#include <cstdint>
#include <string>

#include "base/json.h"

namespace marrow {

struct TrainerState {
  int64_t step = 0;                // optimizer steps done
  int64_t consumed_sequences = 0;  // of the training data: where the sampler goes on
  int64_t skipped_steps = 0;       // for non-finite gradients, so far
  // These must not change between a save and its resume. Empty: not known (an imported model).
  int64_t seed = 0;
  int64_t seq_len = 0;
  bool mask_documents = false;
  std::string corpus;                // fingerprint of [data] train: contents and weights
  std::string tokenizer;             // "bytes", or "tokenizer.json" in the checkpoint's folder
  std::string tokenizer_hash;        // Tokenizer::hash()
  int64_t end_of_document = -1;      // id, or -1
  std::string optimizer = "none";    // "adamw", "muon"; "none": no optimizer state was saved
  std::string state_dtype = "fp32";  // of the optimizer state: "fp32", "bf16"
};

std::string to_json(const TrainerState& state);
TrainerState parse_trainer_state(const Json& json);

// Errors (kUsage), naming the field and both values, unless two config.json are of one model: they
// may differ in fields that change nothing of what it computes. weights_of: where a run of its own takes its weights
// from, which may also have another balance coefficient and more positions.
void check_same_model(const Json& saved, const Json& current, const std::string& weights_of = "");

// Errors (kUsage), naming the config key and both values, unless a run of `current` and `current_config` (config.json)
// goes on where `saved` stopped. What is not compared may differ: steps, mesh, batch, dtype, [router], learning rate …
void check_resumable(const TrainerState& saved, const Json& saved_config, const TrainerState& current,
                     const Json& current_config);

}  // namespace marrow
