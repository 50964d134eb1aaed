// Model folders as the Hugging Face Hub lays them out: config.json, tokenizer files, safetensors.
#pragma once
#include "base/files.h"
#include "base/json.h"
#include "models/model_weights.h"
#include "ops/parameter_spec.h"
#include "ops/pch.h"

namespace marrow {

// The files of `folder` that make up its tokenizer (and its chat template), those that exist.
std::vector<SideFile> read_tokenizer_files(const std::string& folder);

// `config` with the fields of both styles of the Hub (rope_theta and rope_parameters, num_experts and
// num_local_experts, torch_dtype and dtype) and the end-of-document id (< 0: left as it is).
std::string hub_config(const Json& config, at::ScalarType dtype, int64_t end_of_document);

struct HubExport {
  std::string output;                 // must not exist yet
  const Json& config;                 // the model's config.json
  std::vector<HubTensor> model;       // without lm_head where embeddings are tied
  at::ScalarType dtype = at::kFloat;  // or at::kBFloat16
  int64_t end_of_document = -1;
  std::vector<SideFile> tokenizer_files = {};
  std::string generation_config = {};  // text to start from, if any
  int64_t max_shard_bytes = 5'000'000'000;
};

// Writes a folder that transformers, vLLM and SGLang load; appears whole or not at all. Memory is bounded, whatever the
// model's size. Returns the bytes written.
int64_t write_hub_folder(const HubExport& to, const ModelWeights& weights);

}  // namespace marrow
