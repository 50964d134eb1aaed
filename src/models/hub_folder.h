// Model folders as the Hugging Face Hub lays them out: config.json, tokenizer files, safetensors.
#pragma once
#include "base/json.h"
#include "models/safetensors.h"

namespace marrow {

struct WeightRules {
  bool tied_embeddings = false;  // lm_head.weight may be absent, else it must equal the embedding
  bool allow_unknown = false;    // tensors that the model lacks are listed, not refused
  bool text_only = false;        // and those of images or of predicting further tokens, which allow_unknown is not for
};

// The tensors of a model, wherever a folder keeps them: one file, shards with an index, or a checkpoint; experts
// stacked as mlp.experts.gate_up_proj [E, 2I, H] and down_proj [E, H, I]; any float dtype; stacks also as MXFP4; within
// a model of text and images as model.language_model.
class ModelWeights {
 public:
  // Errors (kBadInput) that name the tensor: missing, of another shape, or not the model's.
  ModelWeights(const std::string& folder, const std::vector<HubTensor>& model, const WeightRules& rules);

  // Copies elements [begin, begin + out.numel()) of a Hub tensor into `out` ([n], any device).
  void read(const HubTensor& tensor, int64_t begin, at::Tensor out) const;
  // The whole tensor as `dtype` on the CPU, in parts of bounded size: visit(begin, part [n]).
  void read_in_parts(const HubTensor& tensor, at::ScalarType dtype,
                     const std::function<void(int64_t, const at::Tensor&)>& visit) const;
  const std::vector<std::string>& ignored() const { return ignored_; }  // under allow_unknown or text_only

 private:
  struct Source {
    std::string stored;  // name in the files
    int64_t offset = 0;  // elements before the tensor's first
    bool mxfp4 = false;  // as NAME_blocks and NAME_scales
  };
  Source find_source(const HubTensor& tensor) const;
  bool is_mxfp4(const HubTensor& tensor) const;
  void read_mxfp4(const HubTensor& tensor, int64_t begin, const at::Tensor& out) const;
  void check_all_used(const std::unordered_map<std::string, int64_t>& used, const WeightRules& rules);

  std::string folder_;
  TensorFiles files_;
  std::unordered_map<std::string, Source> sources_;
  std::vector<std::string> ignored_;
  bool in_language_model_ = false;  // model.X is called model.language_model.X
};

// The files of `folder` that make up its tokenizer (and its chat template), those that exist.
std::vector<SideFile> read_tokenizer_files(const std::string& folder);

// `config`, of its language model, with the fields of both styles of the Hub (rope_theta and rope_parameters,
// num_experts and num_local_experts, torch_dtype and dtype) and the end-of-document id (< 0: left as it is).
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

// Writes a folder that transformers, vLLM and SGLang load, whole or not at all, in bounded memory. Returns its bytes.
int64_t write_hub_folder(const HubExport& to, const ModelWeights& weights);

}  // namespace marrow
