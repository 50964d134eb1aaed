// What a model declares about each of its parameters: names, shapes, initial values, update rule.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace marrow {

// A tensor as the Hugging Face Hub names it.
struct HubTensor {
  std::string name;            // "model.layers.3.mlp.experts.7.down_proj.weight"
  std::vector<int64_t> shape;  // row-major
  bool always_fp32 = false;    // also in an export of bf16
  // Empty: a matrix, or equal ones stacked in the leading dimensions. Else several logical matrices (Muon's unit) in
  // each of these, which take turns all along it, so many elements of each. Of a matrix [R, C]: {C, C} is two matrices
  // whose rows alternate, {1, 1} two whose columns do, {2 · C, (R − 2) · C} one of the first two rows and one of the
  // rest.
  std::vector<int64_t> turns = {};
  int64_t elements() const {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return n;
  }
};

// kMuon: a matrix, or several stacked in the leading dimensions; under AdamW both rules are AdamW.
enum class UpdateRule { kAdamW, kMuon };
// kLogUniform: ln of a number that is uniform in (0, init_value), and of 0.01 where that is less.
enum class InitKind { kNormal, kConstant, kLogUniform };

// One tensor of the engine. It is the row-major concatenation of its `parts`, so that q, k and v,
// or the experts of a layer, are one product for the GPU and many tensors for the Hub.
struct ParameterSpec {
  std::string name;            // "layers.3.qkv": unique, what the model file asks for
  std::vector<int64_t> shape;  // of this rank's part: [E/ep, 2I, H] for experts
  std::vector<HubTensor> parts;
  bool expert = false;  // sharded over dp×cp instead of dp×cp×ep
  UpdateRule rule = UpdateRule::kMuon;
  bool decay = true;  // weight decay acts on it
  InitKind init = InitKind::kNormal;
  float init_value = 0.02f;  // standard deviation, constant or bound
};

}  // namespace marrow
