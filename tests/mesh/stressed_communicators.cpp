#include "mesh/stressed_communicators.h"

#include <random>

#include "parallel/mesh_communicators.h"
#ifdef MARROW_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#endif

// The linker renames calls of make_mesh_communicators to __wrap_…, and the function itself to __real_….
#define MAKE_SYMBOL "_ZN6marrow23make_mesh_communicatorsERKNS_4MeshERNS_9BootstrapERKNS_19CommunicatorOptionsE"

namespace marrow::test {
namespace {

bool delays_on = false;

class StressedCommunicator final : public Communicator {
 public:
  StressedCommunicator(std::unique_ptr<Communicator> inner, at::Device device, int64_t world_rank)
      : Communicator(inner->name(), inner->world_ranks(), world_rank),
        inner_(std::move(inner)),
        device_(device),
        random_(static_cast<uint64_t>(world_rank) * 977 + next_++) {}

  ~StressedCommunicator() override {
    if (std::uncaught_exceptions() > 0) return;
    const int64_t size = inner_->size();
    const at::Tensor chains = at::zeros({size}, at::TensorOptions(device_).dtype(at::kLong));
    chains[inner_->rank()].fill_(static_cast<int64_t>(chain_));
    std::vector<int64_t> bounds(static_cast<size_t>(size) + 1);
    for (int64_t rank = 0; rank <= size; ++rank) bounds[static_cast<size_t>(rank)] = rank;
    inner_->all_gather(chains, bounds).wait();
    if (!chains.eq(chains[0]).all().item<bool>()) {
      fmt::print(stderr, "WRONG {}: its ranks started different collective operations\n", inner_->name());
      _exit(1);
    }
  }
  PendingTransfer start(const Operation& operation) override {
    // Between two ranks: no part of the order that all must share. Of an all_to_all each rank has sizes of its own.
    const bool pair = operation.kind >= Operation::kSend;
    const int64_t elements = operation.kind == Operation::kAllToAll ? 0 : operation.values().numel();
    if (!pair) {
      chain_ = (chain_ ^ (static_cast<uint64_t>(operation.kind) + 8 * static_cast<uint64_t>(elements) + 1)) *
               0x9E3779B97F4A7C15ULL;
      chain_ ^= chain_ >> 29;
    }
    const uint64_t draw = random_();
    if (draw % 16 != 0) return inner_->start(operation);
    const auto microseconds = static_cast<int64_t>((draw >> 8) % 2000);
#ifdef MARROW_CUDA
    if (device_.is_cuda()) {
      at::cuda::CUDAEvent ready;
      ready.record();
      const at::cuda::CUDAStreamGuard aside(at::cuda::getStreamFromPool());
      ready.block(at::cuda::getCurrentCUDAStream());
      at::cuda::sleep(microseconds * 1500);
      return inner_->start(operation);
    }
#endif
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    return inner_->start(operation);
  }

 private:
  static inline uint64_t next_ = 0;
  std::unique_ptr<Communicator> inner_;
  at::Device device_;
  std::mt19937_64 random_;
  uint64_t chain_ = 0;
};

}  // namespace

void set_random_delays(bool on) { delays_on = on; }

MeshCommunicators real_make(const Mesh&, Bootstrap&, const CommunicatorOptions&) asm("__real_" MAKE_SYMBOL);
MeshCommunicators stressed_make(const Mesh&, Bootstrap&, const CommunicatorOptions&) asm("__wrap_" MAKE_SYMBOL);
MeshCommunicators stressed_make(const Mesh& mesh, Bootstrap& bootstrap, const CommunicatorOptions& options) {
  MeshCommunicators made = real_make(mesh, bootstrap, options);
  if (!delays_on) return made;
  for (auto* one : {&made.world, &made.expert, &made.context, &made.dense_shard, &made.expert_shard, &made.replica,
                    &made.to_next, &made.from_previous, &made.from_next, &made.to_previous}) {
    if (*one != nullptr) *one = std::make_unique<StressedCommunicator>(std::move(*one), options.device, mesh.rank);
  }
  return made;
}

}  // namespace marrow::test
