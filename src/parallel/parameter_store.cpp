#include "parallel/parameter_store.h"

#include "ops/philox_normal.h"

namespace marrow {
namespace {

// Tensors start at multiples of 64 elements: the kernels read 16 bytes at once, and grouped
// products ask for aligned matrices.
constexpr int64_t kAlignment = 64;

int64_t element_count(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

}  // namespace

void ParameterStore::add(const std::string& name, std::vector<ParameterSpec> specs) {
  std::vector<ParameterSpec> dense, experts;
  for (ParameterSpec& spec : specs) (spec.expert ? experts : dense).push_back(std::move(spec));
  if (!dense.empty()) add_group(name, std::move(dense));
  if (!experts.empty()) add_group(name + ".experts", std::move(experts));
}

void ParameterStore::add_group(std::string name, std::vector<ParameterSpec> specs) {
  const auto muon_updates = [&](const ParameterSpec& spec) { return options_.muon && spec.rule == UpdateRule::kMuon; };
  std::stable_sort(specs.begin(), specs.end(), [&](const auto& a, const auto& b) {
    return std::pair(!muon_updates(a), !a.decay) < std::pair(!muon_updates(b), !b.decay);
  });
  FlatGroup group;
  group.name = std::move(name);
  int64_t offset = 0;
  for (const ParameterSpec& spec : specs) {
    group.offsets.push_back(offset);
    offset += (element_count(spec.shape) + kAlignment - 1) / kAlignment * kAlignment;
    if (muon_updates(spec)) {
      ++group.muon_specs;
      group.muon_elements = offset;
    }
  }
  group.offsets.push_back(offset);
  group.specs = std::move(specs);

  const auto fp32 = at::TensorOptions().device(options_.device).dtype(at::kFloat);
  const auto zeros = [&](at::ScalarType dtype, int64_t skipped = 0) {
    return at::zeros({offset - skipped}, fp32.dtype(dtype));
  };
  group.master = zeros(at::kFloat);
  const bool shared = options_.working_dtype == at::kFloat;
  group.working = shared ? group.master : zeros(options_.working_dtype);
  if (options_.training) {
    group.grad = zeros(at::kFloat);
    group.exp_avg = zeros(options_.state_dtype);
    group.exp_avg_sq = zeros(options_.state_dtype, group.muon_elements);
  }

  for (size_t i = 0; i < group.specs.size(); ++i) {
    const ParameterSpec& spec = group.specs[i];
    const int64_t n = element_count(spec.shape);
    Parameter parameter;
    parameter.name = spec.name;
    parameter.value = group.working.narrow(0, group.offsets[i], n).view(spec.shape).detach();
    if (options_.training) {
      parameter.grad = group.grad.narrow(0, group.offsets[i], n).view(spec.shape);
    }
    table_.emplace(spec.name, std::move(parameter));
  }
  groups_.push_back(std::move(group));
}

void ParameterStore::initialize(int64_t seed) {
  for (FlatGroup& group : groups_) {
    for (size_t i = 0; i < group.specs.size(); ++i) {
      const ParameterSpec& spec = group.specs[i];
      int64_t offset = group.offsets[i];
      for (const HubTensor& part : spec.parts) {
        const at::Tensor values = group.master.narrow(0, offset, part.elements());
        if (spec.init == InitKind::kConstant) {
          values.fill_(spec.init_value);
        } else {
          philox_normal(values, seed, part.name, 0, spec.init_value);
        }
        offset += part.elements();
      }
    }
  }
  copy_masters_to_working();
}

void ParameterStore::copy_masters_to_working() {
  for (FlatGroup& group : groups_) {
    if (!group.working.is_same(group.master)) group.working.copy_(group.master);
  }
}

std::vector<OwnedRange> ParameterStore::owned_ranges() const {
  std::vector<OwnedRange> ranges;
  for (const FlatGroup& group : groups_) {
    for (size_t i = 0; i < group.specs.size(); ++i) {
      int64_t offset = group.offsets[i];
      for (const HubTensor& part : group.specs[i].parts) {
        const auto slice = [&](const at::Tensor& flat, int64_t skipped = 0) {
          const bool held = flat.defined() && offset >= skipped;
          return held ? flat.narrow(0, offset - skipped, part.elements()) : at::Tensor();
        };
        ranges.push_back({&part, 0, part.elements(), slice(group.master), slice(group.exp_avg),
                          slice(group.exp_avg_sq, group.muon_elements)});
        offset += part.elements();
      }
    }
  }
  return ranges;
}

std::vector<std::pair<std::string, int64_t>> ParameterStore::bytes_per_element(const Options& options) {
  const bool shared = options.working_dtype == at::kFloat;
  const int64_t state = static_cast<int64_t>(c10::elementSize(options.state_dtype));
  return {{"parameters", shared ? 4 : 6},
          {"gradients", options.training ? 4 : 0},
          {"optimizer states", options.training ? (options.muon ? state : 2 * state) : 0}};
}

int64_t ParameterStore::elements() const {
  int64_t n = 0;
  for (const auto& [name, parameter] : table_) n += parameter.value.numel();
  return n;
}

}  // namespace marrow
