// The parameters of a rank: flat buffers for values and gradients, and its shard of the states.
#pragma once
#include "ops/parameter.h"
#include "ops/parameter_spec.h"
#include "ops/pch.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"

namespace marrow {

// What one rank holds of one Hub tensor, the unit of checkpoints: elements [begin, end), counted row-major, with their
// state. The tensors are 1-D views of end - begin elements, on any device, and are written through.
struct OwnedRange {
  const HubTensor* tensor = nullptr;
  int64_t begin = 0, end = 0;
  at::Tensor master;      // [end - begin] fp32
  at::Tensor exp_avg;     // [end - begin] fp32|bf16: first moment, or Muon's momentum; may be undefined
  at::Tensor exp_avg_sq;  // [end - begin] fp32|bf16: undefined for tensors updated by Muon
};

// Ranks among which something is divided, or which hold copies of it.
struct RankGroup {
  int64_t size = 1, index = 0;  // of this rank
  Communicator* communicator = nullptr;
};

// Parameters that are gathered, reduced and updated together: those of one layer, experts apart.
// Inside, tensors follow each other in the order of `specs`: those that Muon updates first, then
// those with weight decay, then the rest, so that AdamW runs over two long ranges. The flat buffer
// is cut into shards; a rank keeps masters and optimizer states of its own [m] of [n] elements.
struct FlatGroup {
  std::string name;                  // "layers.3.experts"
  std::vector<ParameterSpec> specs;  // shapes of this rank's experts, parts of all experts
  std::vector<int64_t> offsets;      // of each spec's first element; one more entry: their end
  std::vector<int64_t> skipped;      // elements of each spec that ranks of lower ep index hold
  int64_t muon_specs = 0;            // the first so many specs are updated by Muon
  int64_t muon_elements = 0;         // and end here
  RankGroup shards;
  std::vector<int64_t> bounds;  // shard s is [bounds[s], bounds[s + 1]); the last is n

  at::Tensor working;     // [n] in the working dtype
  at::Tensor grad;        // [n] fp32, undefined at inference
  at::Tensor master;      // [m] fp32; this shard of `working` itself in fp32
  at::Tensor rounded;     // [m] bf16: this shard of `working`, which an update writes; else undefined
  at::Tensor own_grad;    // [m] this shard of `grad`
  at::Tensor exp_avg;     // [m] first moment or momentum, undefined at inference
  at::Tensor exp_avg_sq;  // second moment of what AdamW updates in the shard
  std::vector<std::shared_ptr<Fp8Weight>> fp8;  // of the weights whose products are in fp8
  int64_t fp8_elements = 0;                     // of these weights
  PendingTransfer gathering, reducing;
  int64_t users = 0;     // by_layer: calls of start_gather that wait for a release
  bool reduces = false;  // by_layer: start_reduce was called, finish_reduce not yet

  int64_t elements() const { return bounds.back(); }  // n, padding included
  int64_t begin() const { return bounds[shards.index]; }
  int64_t end() const { return bounds[shards.index + 1]; }
  int64_t spec_elements(size_t spec) const { return c10::multiply_integers(specs[spec].shape); }
  at::Tensor own(const at::Tensor& whole) const { return whole.narrow(0, begin(), end() - begin()); }

  // What the shard holds of each Hub tensor, in the buffer's order.
  struct Piece {
    size_t spec = 0;
    const HubTensor* part = nullptr;
    int64_t first = 0, last = 0;  // elements [first, last) of the part
    int64_t at = 0;               // of the first one, in the shard
  };
  std::vector<Piece> pieces() const;
};

class ParameterStore {
 public:
  struct Options {
    at::Device device = at::kCPU;  // kMeta: sizes alone, for bytes()
    at::ScalarType working_dtype = at::kFloat;
    at::ScalarType state_dtype = at::kFloat;
    bool training = true;  // gradients and optimizer states exist
    bool muon = false;     // matrices are updated by Muon, and have no second moment
    // mesh.shard = "layer": `working` and `grad` have memory only from start_gather to release and from
    // open_grad to finish_reduce; masters have their own.
    bool by_layer = false;
    // The matrices that are Muon's under Muon (those of linear and grouped products) have copies in fp8, made when they
    // are first read after start_gather, and gone with the working copy.
    bool fp8 = false;
    bool fp8_at_any_size = false;  // used also where bf16 is faster
    RankGroup ep;                  // hold E/ep consecutive experts each
    RankGroup dense, experts;      // hold the shards of everything but experts, of experts
    RankGroup replicas;            // hold equal shards
    // Fills the groups by the mesh, without communicators.
    void place(const Mesh& mesh);
  };
  explicit ParameterStore(const Options& options) : options_(options) {}

  // Adds the tensors of `specs` as two groups, NAME and NAME.experts, uninitialised. `specs` are
  // those of the whole model's layer: of its experts the store takes this rank's.
  void add(const std::string& name, std::vector<ParameterSpec> specs);

  // Values from (seed, Hub name, element) alone; masters, then working copies. Collective.
  void initialize(int64_t seed);
  // After masters were written from outside (a checkpoint): working copies follow. Collective.
  void copy_masters_to_working();

  // Transfers of a group: every rank of its communicator calls them in the same order. They start here and go on in the
  // background. After start_gather and finish_gather `working` is whole, as its shards' masters say (an optimizer step
  // starts all gathers unless by_layer). After start_reduce and finish_reduce own_grad is the sum over the shards'
  // ranks, and the rest of `grad` undefined; sum_replicas then adds the replicas' own_grads.
  void start_gather(FlatGroup& group);
  void finish_gather(FlatGroup& group) { group.gathering.wait(); }
  void release(FlatGroup& group);    // by_layer: once for each start_gather, when `working` has been read
  void open_grad(FlatGroup& group);  // by_layer: before gradients are added; zeros, unless it is open already
  void start_reduce(FlatGroup& group);
  void finish_reduce(FlatGroup& group);
  void sum_replicas();  // finishes the reductions of all groups

  const std::map<std::string, Parameter, std::less<>>& table() const { return table_; }
  std::vector<FlatGroup>& groups() { return groups_; }
  std::span<FlatGroup> groups_of(std::string_view name);  // the two that add(name) made, or one
  // What this rank holds of each Hub tensor. The ranks of replica 0 hold each element once, and are
  // those that write checkpoints; all ranks read them. Valid while the store lives.
  std::vector<OwnedRange> owned_ranges();
  int64_t elements() const;  // of the model, whole tensors, this rank's experts
  // What the buffers take, by kind. "parameters": working copies, those in fp8, and masters. by_layer: those that stay,
  // and the largest group of those that come and go.
  std::vector<std::pair<std::string, int64_t>> bytes() const;
  const Options& options() const { return options_; }

 private:
  void add_group(std::string name, std::vector<ParameterSpec> specs, bool experts);
  void lay_out(FlatGroup& group, bool experts) const;
  void allocate(FlatGroup& group) const;

  Options options_;
  std::vector<FlatGroup> groups_;
  std::map<std::string, Parameter, std::less<>> table_;
};

}  // namespace marrow
