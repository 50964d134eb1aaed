#include "train/memory_estimate.h"

#include "ops/fp8_quantize.h"
#include "ops/linear_cross_entropy.h"
#include "pipeline/layer_placement.h"
#include "pipeline/model_setup.h"

namespace marrow {
namespace {

// Fitted to the runs on one H200 in docs/benchmarks.md: of what comes and goes within a step the allocator holds so
// much more than is in use; workspaces of the libraries in it.
constexpr double kSlack = 0.15;
constexpr int64_t kWorkspaces = 400'000'000;
// Outside of it: driver and kernels, NCCL's first communicator and each further one; libtorch and MPI on a CPU.
constexpr int64_t kContext = 1'000'000'000, kNccl = 400'000'000, kCommunicator = 50'000'000, kProcess = 150'000'000;

// One layer; on one micro-batch.
struct LayerBytes {
  int64_t kept = 0;           // from forward to backward
  int64_t forward_work = 0;   // besides, while its forward runs
  int64_t backward_work = 0;  // besides, while its backward runs
  int64_t elements = 0;       // of its parameters, before sharding
  int64_t put_off = 0;        // besides `kept`, until weight gradients that are put off were added
};

class Estimator {
 public:
  Estimator(const MoeModel& model, const PretrainConfig& config)
      : model_(model), config_(config), gpu_(config.train.device == TrainDevice::kGpu) {
    element_ = config.train.dtype == TrainDtype::kFp32 ? 4 : 2;
    tokens_ = config.train.micro_batch * config.data.seq_len / config.mesh.cp;
    hidden_ = tokens_ * model.shape().hidden * element_;
    micro_batches_ = config.train.global_batch / (config.train.micro_batch * config.mesh.dp * config.mesh.ep);
    walked_ = std::min(micro_batches_, 4 * config.mesh.pp + 8);  // 2 · pp fill a pipeline
    moved_ = moved_share();
    parts_.pipeline = {config.mesh.schedule, config.mesh.pp};
    parts_.chunk_layers =
        place_layers(parts_.pipeline, model_costs(model, config.data.seq_len, tokens_, config.mesh.ep));
    for (int64_t layer = 0; layer < model.shape().layers; ++layer) layers_.push_back(layer_bytes(layer));
  }

  RankMemory rank(const Mesh& mesh) {
    parts_.pipeline_rank = mesh.p;
    ParameterStore store(store_options(config_, mesh, at::kMeta));
    add_model_parameters(model_, parts_, store);
    const auto kinds = store.bytes();
    RankMemory memory{kinds[0].second, kinds[1].second, kinds[2].second, peak_activations()};
    // Messages: being received, arrived early, sent and not waited for; and rows of experts in both directions.
    const int64_t pp = config_.mesh.pp, messages = (pp > 1 ? 2 * pp + 5 : 0) * hidden_ + std::llround(4 * moved_);
    memory.outside = outside(mesh.shape);
    const auto& shape = model_.shape();
    const int64_t rope = 8 * shape.max_position * static_cast<int64_t>(shape.rope_frequencies.size());  // cos and sin
    memory.buffers = memory.outside + messages + rope + (store.options().by_layer ? passing_layers() : 0) +
                     std::llround(kSlack * static_cast<double>(memory.activations + messages)) +
                     (gpu_ ? kWorkspaces : 0);
    memory.save_copy = memory.optimizer;
    for (const FlatGroup& group : store.groups()) memory.save_copy += 4 * (group.end() - group.begin());
    return memory;
  }

  double step_seconds() const {
    if (!gpu_ || element_ != 2) return 0;
    ModelCosts costs = model_costs(model_, config_.data.seq_len, tokens_, config_.mesh.ep);
    const auto simulated = [&](int64_t n) {
      return simulate_pipeline(parts_.pipeline, n, all_pipeline_actions(parts_.pipeline, n),
                               estimated_times(parts_.pipeline, parts_.chunk_layers, costs, tokens_))
          .makespan;
    };
    const auto seconds = [&] {
      const double walk = simulated(walked_), others = static_cast<double>(micro_batches_ - walked_);
      return others == 0 ? walk : walk + others * (walk - simulated(walked_ - 1));
    };
    const double once = seconds();
    costs.head = 0;
    return once + (recomputes() ? seconds() / 3 : 0);
  }

 private:
  bool recomputes() const { return config_.train.recompute == Recompute::kLayer; }
  bool fuses_pairs() const { return config_.mesh.pp > 1 || config_.mesh.ep > 1; }  // as Executor::train

  // Bytes of the rows that a layer sends to the ranks of its experts (and as many come): one for each token and
  // rank. To one of two ranks all go; else those that chance sends.
  double moved_share() const {
    const int64_t ep = config_.mesh.ep, experts = model_.shape().experts;
    double absent = ep == 2 ? 0 : 1;  // the chance that a rank has none of a token's experts
    for (int64_t i = 0; i < model_.shape().top_k; ++i) {
      absent *= std::max(0.0, static_cast<double>(experts - experts / ep - i) / static_cast<double>(experts - i));
    }
    return ep == 1 ? 0 : static_cast<double>(hidden_ * ep) * (1 - absent);
  }

  // What LayerPass holds: the operators' tensors, and the rows that the stages hand to each other.
  LayerBytes layer_bytes(int64_t layer) const {
    const ActivationBytes each = model_.activation_bytes(layer, element_);
    const bool dense = layer < model_.shape().dense_layers;
    const int64_t ep = config_.mesh.ep, top_k = dense ? 0 : model_.shape().top_k;
    const int64_t rows = tokens_ * top_k * (ep == 2 ? 2 : 1);  // of two ranks, each makes room for all
    const int64_t between = ep == 1 || dense ? hidden_ * top_k : std::llround(3 * moved_);
    const int64_t index = 12 * rows, cp = config_.mesh.cp;
    const int64_t chunks = cp > 1 ? config_.train.micro_batch * 2 * cp * each.chunk_ring_kept : 0;
    const int64_t ring = (cp > 1 ? tokens_ * each.token_ring : 0) + chunks;
    const int64_t ring_kept = (cp > 1 ? tokens_ * each.token_ring_kept : 0) + chunks;
    const int64_t kept = tokens_ * each.token + ring_kept + rows * each.expert_row + between + index;
    const int64_t work = std::max(tokens_ * each.token_backward + ring, rows * each.expert_row_backward);
    int64_t elements = 0;
    bool experts_in_fp8 = !gpu_ || config_.train.fp8_at_any_size;  // the gradient of a weight of theirs, as fp8_wins
    for (const ParameterSpec& spec : model_.layer_specs(layer)) {
      const int64_t n = c10::multiply_integers(spec.shape), experts = spec.shape[0];
      elements += spec.expert ? n / ep : n;
      experts_in_fp8 |=
          spec.expert && fp8_pays(Fp8Product::kExpertWeightGrad, rows * ep / experts, spec.shape.back(), n / experts);
    }
    const int64_t gone = ep == 1 || dense ? between : std::llround(moved_);  // what S5 has summed
    const int64_t input = hidden_ + (ep == 1 || dense ? 0 : index);          // and where tokens go
    if (recomputes()) return {input, kept, std::max(kept, kept - gone + work), elements, kept - gone - input};
    const bool cheaply = config_.train.recompute == Recompute::kCheap;
    // Of normed, linear keeps this, and of experts' rows the grouped product where its weight gradient is in fp8.
    int64_t in_fp8 = config_.train.dtype == TrainDtype::kFp8 ? hidden_ / 2 : 0;
    if (in_fp8 > 0 && experts_in_fp8) in_fp8 += rows * each.expert_row_cheap / 2;
    const int64_t cheap = cheaply ? tokens_ * each.token_cheap + rows * each.expert_row_cheap - in_fp8 : 0;
    return {kept - cheap - gone, cheap + gone, cheap + work, elements, cheap};
  }

  // Logits of some rows, fp32 on the CPU; the normed states, their gradient, and that before the norm.
  int64_t head_work() const {
    return cross_entropy_rows(tokens_, model_.shape().vocab, !gpu_) * model_.shape().vocab * (gpu_ ? element_ : 4) +
           3 * hidden_;
  }

  // Walks through a step as Executor does. A pass whose weight gradients are put off keeps the inputs of its
  // products and the gradients of their outputs, which weigh as much as what the forward had kept.
  int64_t peak_activations() const {
    std::vector<PipelineAction> actions = {{ActionKind::kForward, {0, 0}, {}}, {ActionKind::kBackward, {}, {0, 0}}};
    if (fuses_pairs()) actions = pipeline_actions(parts_.pipeline, parts_.pipeline_rank, walked_);
    const auto layers = [&](const PipelinePass& pass) {
      return pass ? parts_.layers(pass.slot, model_.shape()) : LayerRange{};
    };
    int64_t held = 0, peak = 0;
    for (const PipelineAction& action : actions) {
      auto [down, down_end] = layers(action.forward);
      auto [up_end, up] = layers(action.backward);
      const bool frees = action.backward && action.kind != ActionKind::kBackwardInput;
      while (down < down_end || up > up_end) {
        const LayerBytes forward = down < down_end ? layers_[down++] : LayerBytes{};
        const LayerBytes backward = up > up_end ? layers_[--up] : LayerBytes{};
        held += forward.kept;
        peak = std::max(peak, held + forward.forward_work + backward.backward_work);
        if (action.kind == ActionKind::kBackwardInput) held += backward.put_off;
        held -= frees ? backward.kept : 0;
        if (action.kind == ActionKind::kWeightGrad) held -= backward.put_off;
      }
      held += (action.forward ? hidden_ : 0) - (frees ? hidden_ : 0);  // a chunk's output, later its gradient
      const bool head = action.forward && parts_.has_head(action.forward.slot);
      peak = std::max(peak, held + (head ? head_work() : 0));
    }
    return peak;
  }

  // mesh.shard = "layer": working copies of a pair's two layers; gradients of a layer and the one before it, which
  // are still being reduced, or of a chunk where weight gradients are put off.
  int64_t passing_layers() const {
    int64_t largest = model_.shape().vocab * model_.shape().hidden, chunk = 0;
    for (int64_t slot = 0; slot < parts_.pipeline.slots(); ++slot) {
      const auto [first, last] = parts_.layers(slot, model_.shape());
      int64_t sum = 0;
      for (int64_t layer = first; layer < last; ++layer) {
        largest = std::max(largest, layers_[layer].elements);
        sum += layers_[layer].elements;
      }
      if (parts_.pipeline.slots() == 2) chunk = std::max(chunk, sum);
    }
    const int64_t element = element_ + (config_.train.dtype == TrainDtype::kFp8 ? 2 : 0);  // both ways round
    return largest * element * (fuses_pairs() ? 2 : 1) + 4 * std::max(2 * largest, chunk);
  }

  int64_t outside(const MeshShape& mesh) const {
    if (!gpu_) return kProcess;
    const int64_t copies = mesh.dp / mesh.replicate * mesh.cp;
    int64_t groups = mesh.pp > 1 ? 4 : 0;  // as make_mesh_communicators
    for (const int64_t size :
         {mesh.world(), mesh.dp * mesh.cp * mesh.ep, mesh.ep, mesh.cp, copies, copies * mesh.ep, mesh.replicate}) {
      groups += size > 1 ? 1 : 0;
    }
    return kContext + (groups > 0 ? kNccl + (groups - 1) * kCommunicator : 0);
  }

  const MoeModel& model_;
  const PretrainConfig& config_;
  bool gpu_;
  int64_t element_, tokens_, hidden_, micro_batches_;  // bytes of an element, T, bytes of [T, H], n of a rank
  int64_t walked_;  // of these, the first so many: more change no peak, and lengthen a step evenly
  double moved_;
  ModelParts parts_;  // communicators unset
  std::vector<LayerBytes> layers_;
};

at::ScalarType scalar_type(TrainDtype dtype) { return dtype == TrainDtype::kFp32 ? at::kFloat : at::kBFloat16; }

}  // namespace

ParameterStore::Options store_options(const PretrainConfig& config, const Mesh& mesh, at::Device device) {
  ParameterStore::Options options;
  options.device = device;
  options.working_dtype = scalar_type(config.train.dtype);
  options.state_dtype = scalar_type(config.optimizer.state_dtype);
  options.muon = config.optimizer.name == OptimizerName::kMuon;
  options.fp8 = config.train.dtype == TrainDtype::kFp8;
  options.fp8_at_any_size = config.train.fp8_at_any_size;
  options.by_layer = config.mesh.shard == ShardMode::kLayer;
  options.place(mesh);
  return options;
}

RunEstimate estimate_run(const MoeModel& model, const PretrainConfig& config) {
  const MeshShape& shape = config.mesh;
  Estimator estimator(model, config);
  RunEstimate estimate;
  for (int64_t rank = 0; rank < shape.world(); ++rank) {
    const Mesh mesh(shape, rank);
    // Without Muon all shards are of one size: what a pipeline rank's first holds, all of them hold.
    const bool known = mesh.rank_at(mesh.p, 0, 0, 0) < rank && config.optimizer.name != OptimizerName::kMuon;
    estimate.ranks.push_back(known ? estimate.ranks.back() : estimator.rank(mesh));
    if (mesh.d >= shape.dp / shape.replicate) estimate.ranks.back().save_copy = 0;  // the first replica saves
  }
  estimate.step_seconds = estimator.step_seconds();
  return estimate;
}

}  // namespace marrow
