#include "parallel/parameter_store.h"

#include "ops/fp8_quantize.h"
#include "ops/philox_normal.h"

namespace marrow {
namespace {

// Tensors start at multiples of 64 elements: kernels read 16 bytes at once, grouped products want aligned matrices.
constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

int64_t bytes_of(const at::Tensor& flat) { return flat.defined() ? static_cast<int64_t>(flat.nbytes()) : 0; }

// Takes or gives back the memory of a flat buffer. Views of it stay valid, and mean the new memory.
void set_memory(const at::Tensor& flat, bool present) {
  c10::StorageImpl* storage = flat.storage().unsafeGetStorageImpl();
  const size_t bytes = present ? flat.nbytes() : 0;
  storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
  storage->set_nbytes(bytes);
}

void mark_stale(const FlatGroup& group) {
  for (const auto& weight : group.fp8) weight->stale();
}

RankGroup place_in(const std::vector<int64_t>& ranks, int64_t rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return {static_cast<int64_t>(ranks.size()), found - ranks.begin(), nullptr};
}

// Where the matrices that Muon updates begin, and where the last one ends.
std::vector<int64_t> muon_cuts(const FlatGroup& group) {
  std::vector<int64_t> cuts;
  for (int64_t i = 0; i < group.muon_specs; ++i) {
    const ParameterSpec& spec = group.specs[i];
    const int64_t first = group.offsets[i], last = first + group.spec_elements(i);
    int64_t at = first - group.skipped[i];
    for (const HubTensor& part : spec.parts) {
      const int64_t matrix = part.shape.back() * part.shape[part.shape.size() - 2];
      for (const int64_t end = at + part.elements(); at < end; at += matrix) {
        if (at >= first && at < last) cuts.push_back(at);
      }
    }
  }
  cuts.push_back(group.muon_elements);
  return cuts;
}

// Equal shards, unless Muon forbids: its matrices stay whole, and the cuts come as near as they may.
std::vector<int64_t> shard_bounds(const FlatGroup& group, int64_t shards) {
  const int64_t total = group.offsets.back();
  std::vector<int64_t> bounds;
  if (group.muon_specs == 0) {
    const int64_t size = round_up(total, kAlignment * shards) / shards;
    for (int64_t s = 0; s <= shards; ++s) bounds.push_back(s * size);
    return bounds;
  }
  const std::vector<int64_t> cuts = muon_cuts(group);
  for (int64_t s = 0; s <= shards; ++s) {
    const int64_t wish = std::min(round_up(total * s / shards, kAlignment), total);
    if (wish >= group.muon_elements) {
      bounds.push_back(wish);
      continue;
    }
    const auto above = std::lower_bound(cuts.begin(), cuts.end(), wish);
    const bool below_is_nearer = above != cuts.begin() && wish - *(above - 1) <= *above - wish;
    bounds.push_back(below_is_nearer ? *(above - 1) : *above);
  }
  return bounds;
}

}  // namespace

std::vector<FlatGroup::Piece> FlatGroup::pieces() const {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < specs.size(); ++i) {
    const int64_t low = std::max(offsets[i], begin()), high = std::min(offsets[i] + spec_elements(i), end());
    int64_t at = offsets[i] - skipped[i];
    for (const HubTensor& part : specs[i].parts) {
      const int64_t first = std::max(low, at), last = std::min(high, at + part.elements());
      if (first < last) pieces.push_back({i, &part, first - at, last - at, first - begin()});
      at += part.elements();
    }
  }
  return pieces;
}

void ParameterStore::Options::place(const Mesh& mesh) {
  ep = place_in(mesh.expert_group(), mesh.rank);
  dense = place_in(mesh.dense_shard_group(), mesh.rank);
  experts = place_in(mesh.expert_shard_group(), mesh.rank);
  replicas = place_in(mesh.replica_group(), mesh.rank);
}

void ParameterStore::add(const std::string& name, std::vector<ParameterSpec> specs) {
  std::vector<ParameterSpec> dense, experts;
  for (ParameterSpec& spec : specs) (spec.expert ? experts : dense).push_back(std::move(spec));
  if (!dense.empty()) add_group(name, std::move(dense), false);
  if (!experts.empty()) add_group(name + ".experts", std::move(experts), true);
}

void ParameterStore::add_group(std::string name, std::vector<ParameterSpec> specs, bool experts) {
  FlatGroup group;
  group.name = std::move(name);
  group.specs = std::move(specs);
  lay_out(group, experts);
  allocate(group);
  for (size_t i = 0; i < group.specs.size(); ++i) {
    const ParameterSpec& spec = group.specs[i];
    const auto view = [&](const at::Tensor& flat) {
      return flat.narrow(0, group.offsets[i], group.spec_elements(i)).view(spec.shape).detach();
    };
    Parameter parameter{spec.name, view(group.working), options_.training ? view(group.grad) : at::Tensor()};
    if (options_.fp8 && spec.rule == UpdateRule::kMuon) {
      parameter.fp8 = group.fp8.emplace_back(std::make_shared<Fp8Weight>(options_.fp8_at_any_size));
      group.fp8_elements += group.spec_elements(i);
    }
    table_.emplace(spec.name, std::move(parameter));
  }
  for (const at::Tensor& flat : {group.working, group.grad}) {  // not before all views are made
    if (options_.by_layer && flat.defined()) set_memory(flat, false);
  }
  groups_.push_back(std::move(group));
}

// Order and places of the tensors, bounds of the shards.
void ParameterStore::lay_out(FlatGroup& group, bool experts) const {
  const auto muon_updates = [&](const ParameterSpec& spec) { return options_.muon && spec.rule == UpdateRule::kMuon; };
  std::stable_sort(group.specs.begin(), group.specs.end(), [&](const auto& a, const auto& b) {
    return std::pair(!muon_updates(a), !a.decay) < std::pair(!muon_updates(b), !b.decay);
  });
  int64_t offset = 0;
  for (ParameterSpec& spec : group.specs) {
    if (experts) {
      MARROW_CHECK(spec.shape[0] % options_.ep.size == 0, ExitCode::kUsage,
                   Fix(fmt::format("set mesh.ep to a divisor of {}", spec.shape[0])),
                   "the {} experts of {} do not divide by mesh.ep = {}", spec.shape[0], spec.name, options_.ep.size);
      spec.shape[0] /= options_.ep.size;
    }
    group.offsets.push_back(offset);
    const int64_t n = group.spec_elements(group.offsets.size() - 1);
    group.skipped.push_back(experts ? options_.ep.index * n : 0);
    offset += round_up(n, kAlignment);
    if (muon_updates(spec)) {
      ++group.muon_specs;
      group.muon_elements = offset;
    }
  }
  group.offsets.push_back(offset);
  group.shards = experts ? options_.experts : options_.dense;
  group.bounds = shard_bounds(group, group.shards.size);
}

void ParameterStore::allocate(FlatGroup& group) const {
  const auto zeros = [&](int64_t n, at::ScalarType dtype) {
    return at::zeros({n}, at::TensorOptions().device(options_.device).dtype(dtype));
  };
  const int64_t own = group.end() - group.begin();
  group.working = zeros(group.elements(), options_.working_dtype);
  const bool shared = options_.working_dtype == at::kFloat && !options_.by_layer;
  group.master = shared ? group.own(group.working) : zeros(own, at::kFloat);
  if (!shared && !options_.by_layer) group.rounded = group.own(group.working);
  if (!options_.training) return;
  group.grad = zeros(group.elements(), at::kFloat);
  group.own_grad = options_.by_layer ? zeros(own, at::kFloat) : group.own(group.grad);
  group.exp_avg = zeros(own, options_.state_dtype);
  group.exp_avg_sq =
      zeros(std::min(own, std::max<int64_t>(0, group.end() - group.muon_elements)), options_.state_dtype);
}

void ParameterStore::initialize(int64_t seed) {
  for (FlatGroup& group : groups_) {
    for (const FlatGroup::Piece& piece : group.pieces()) {
      const ParameterSpec& spec = group.specs[piece.spec];
      const at::Tensor values = group.master.narrow(0, piece.at, piece.last - piece.first);
      if (spec.init == InitKind::kConstant) {
        values.fill_(spec.init_value);
      } else if (spec.init == InitKind::kLogUniform) {
        philox_log_uniform(values, seed, piece.part->name, piece.first, spec.init_value);
      } else {
        philox_normal(values, seed, piece.part->name, piece.first, spec.init_value);
      }
    }
  }
  copy_masters_to_working();
}

void ParameterStore::copy_masters_to_working() {
  if (options_.by_layer) return;  // start_gather copies
  for (FlatGroup& group : groups_) {
    if (group.rounded.defined()) group.rounded.copy_(group.master);
    start_gather(group);
  }
  for (FlatGroup& group : groups_) finish_gather(group);
}

void ParameterStore::start_gather(FlatGroup& group) {
  if (options_.by_layer) {
    if (group.users++ > 0) return;
    set_memory(group.working, true);
    group.own(group.working).copy_(group.master);
  }
  mark_stale(group);
  if (group.shards.size == 1) return;
  group.gathering = group.shards.communicator->all_gather(group.working, group.bounds);
}

void ParameterStore::release(FlatGroup& group) {
  if (!options_.by_layer || --group.users > 0) return;
  finish_gather(group);
  mark_stale(group);
  set_memory(group.working, false);
}

void ParameterStore::open_grad(FlatGroup& group) {
  if (!options_.by_layer) return;
  finish_reduce(group);
  if (group.grad.storage().nbytes() > 0) return;
  set_memory(group.grad, true);
  group.grad.zero_();
}

void ParameterStore::start_reduce(FlatGroup& group) {
  group.reduces = true;
  if (group.shards.size == 1) return;
  group.reducing = group.shards.communicator->reduce_scatter(group.grad, group.bounds);
}

void ParameterStore::finish_reduce(FlatGroup& group) {
  group.reducing.wait();
  if (!std::exchange(group.reduces, false) || !options_.by_layer) return;
  group.own_grad.add_(group.own(group.grad));
  set_memory(group.grad, false);
}

void ParameterStore::sum_replicas() {
  for (FlatGroup& group : groups_) {
    finish_reduce(group);
    if (options_.replicas.size > 1) group.reducing = options_.replicas.communicator->all_reduce(group.own_grad);
  }
  for (FlatGroup& group : groups_) finish_reduce(group);
}

std::span<FlatGroup> ParameterStore::groups_of(std::string_view name) {
  const auto named = [&](const FlatGroup& group) {
    return group.name == name || group.name == fmt::format("{}.experts", name);
  };
  const auto first = std::ranges::find_if(groups_, named);
  return {first, std::find_if_not(first, groups_.end(), named)};
}

std::vector<OwnedRange> ParameterStore::owned_ranges() {
  std::vector<OwnedRange> ranges;
  for (FlatGroup& group : groups_) {
    finish_gather(group);  // in fp32 it works on the masters
    const int64_t without_square = std::max<int64_t>(0, group.muon_elements - group.begin());
    for (const FlatGroup::Piece& piece : group.pieces()) {
      const auto slice = [&](const at::Tensor& flat, int64_t skipped = 0) {
        const bool held = flat.defined() && piece.at >= skipped;
        return held ? flat.narrow(0, piece.at - skipped, piece.last - piece.first) : at::Tensor();
      };
      ranges.push_back({piece.part, piece.first, piece.last, slice(group.master), slice(group.exp_avg),
                        slice(group.exp_avg_sq, without_square)});
    }
  }
  return ranges;
}

std::vector<std::pair<std::string, int64_t>> ParameterStore::bytes() const {
  int64_t parameters = 0, gradients = 0, states = 0, largest = 0;
  for (const FlatGroup& group : groups_) {
    const int64_t working = bytes_of(group.working) + 2 * group.fp8_elements, grad = bytes_of(group.grad);
    const bool apart = options_.by_layer || group.rounded.defined();
    parameters += (options_.by_layer ? 0 : working) + (apart ? bytes_of(group.master) : 0);
    gradients += options_.by_layer ? bytes_of(group.own_grad) : grad;
    states += bytes_of(group.exp_avg) + bytes_of(group.exp_avg_sq);
    largest = std::max(largest, working + grad);
  }
  std::vector<std::pair<std::string, int64_t>> kinds{
      {"parameters", parameters}, {"gradients", gradients}, {"optimizer states", states}};
  if (options_.by_layer) kinds.emplace_back("a layer's whole parameters and gradients", largest);
  return kinds;
}

int64_t ParameterStore::elements() const {
  int64_t n = 0;
  for (const auto& [name, parameter] : table_) n += parameter.value.numel();
  return n;
}

}  // namespace marrow
