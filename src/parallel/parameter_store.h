// The parameters of a rank: flat buffers for values, gradients, masters and optimizer states.
#pragma once
#include "ops/parameter.h"
#include "ops/parameter_spec.h"
#include "ops/pch.h"
#include "parallel/owned_range.h"

namespace marrow {

// Parameters that are gathered, reduced and updated together: those of one layer, experts apart.
// Inside, tensors follow each other in the order of `specs`: those that Muon updates first, then
// those with weight decay, then the rest, so that AdamW runs over two long ranges.
struct FlatGroup {
  std::string name;  // "layers.3.experts"
  std::vector<ParameterSpec> specs;
  std::vector<int64_t> offsets;  // of each spec's first element; one more entry: the total
  at::Tensor working;            // [n] in the working dtype; shares the master's memory in fp32
  at::Tensor grad;               // [n] fp32, undefined at inference
  at::Tensor master;             // [n] fp32
  at::Tensor exp_avg;            // [n] first moment or momentum, undefined at inference
  at::Tensor exp_avg_sq;         // [n - muon_elements] second moment
  int64_t muon_specs = 0;        // the first so many specs are updated by Muon
  int64_t muon_elements = 0;     // and end here

  int64_t elements() const { return offsets.back(); }
};

class ParameterStore {
 public:
  struct Options {
    at::Device device = at::kCPU;
    at::ScalarType working_dtype = at::kFloat;
    at::ScalarType state_dtype = at::kFloat;
    bool training = true;  // gradients and optimizer states exist
    bool muon = false;     // matrices are updated by Muon, and have no second moment
  };
  explicit ParameterStore(const Options& options) : options_(options) {}

  // Adds the tensors of `specs` as two groups, NAME and NAME.experts, uninitialised.
  void add(const std::string& name, std::vector<ParameterSpec> specs);

  // Values from (seed, Hub name, element) alone; masters, then working copies; states zero.
  void initialize(int64_t seed);
  // After masters were written from outside (a checkpoint): working copies follow.
  void copy_masters_to_working();

  const std::map<std::string, Parameter, std::less<>>& table() const { return table_; }
  std::vector<FlatGroup>& groups() { return groups_; }
  // What this rank holds of each Hub tensor, for checkpoints. Valid while the store lives.
  std::vector<OwnedRange> owned_ranges() const;
  int64_t elements() const;
  // What an element takes, by kind ("parameters": working copy and master).
  static std::vector<std::pair<std::string, int64_t>> bytes_per_element(const Options& options);
  const Options& options() const { return options_; }

 private:
  void add_group(std::string name, std::vector<ParameterSpec> specs);

  Options options_;
  std::vector<FlatGroup> groups_;
  std::map<std::string, Parameter, std::less<>> table_;
};

}  // namespace marrow
