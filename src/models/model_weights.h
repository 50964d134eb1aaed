// The weights of one model in a folder of safetensors files, under whatever names the Hub uses.
#pragma once
#include "models/safetensors.h"

namespace marrow {

struct WeightRules {
  bool tied_embeddings = false;  // lm_head.weight may be absent, else it must equal the embedding
  bool allow_unknown = false;    // tensors that the model lacks are listed, not refused
};

// The tensors of a model, wherever a folder keeps them: one file, shards with an index, or a
// checkpoint; experts stacked as mlp.experts.gate_up_proj
// [E, 2I, H] and down_proj [E, H, I]; any float dtype.
class ModelWeights {
 public:
  // Errors (kBadInput) that name the tensor: missing, of another shape, or not the model's.
  ModelWeights(const std::string& folder, const std::vector<HubTensor>& model, const WeightRules& rules);

  // Copies elements [begin, begin + out.numel()) of a Hub tensor into `out` ([n], any device).
  void read(const HubTensor& tensor, int64_t begin, at::Tensor out) const;
  // The whole tensor as `dtype` on the CPU, in parts of bounded size: visit(begin, part [n]).
  void read_in_parts(const HubTensor& tensor, at::ScalarType dtype,
                     const std::function<void(int64_t, const at::Tensor&)>& visit) const;
  const std::vector<std::string>& ignored() const { return ignored_; }  // under allow_unknown

 private:
  struct Source {
    std::string stored;  // name in the files
    int64_t offset = 0;  // elements before the tensor's first
  };
  std::optional<Source> find_source(const HubTensor& tensor) const;
  std::optional<Source> find_in_stack(const HubTensor& tensor) const;
  void check_all_used(const std::unordered_map<std::string, int64_t>& used, const WeightRules& rules);
  void check_tied_head() const;

  std::string folder_;
  TensorFiles files_;
  std::unordered_map<std::string, Source> sources_;
  std::vector<std::string> ignored_;
};

}  // namespace marrow
