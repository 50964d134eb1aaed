#include "parallel/mesh_communicators.h"

#include <numeric>

#include "parallel/checked_communicator.h"
#include "parallel/mpi_communicator.h"
#include "parallel/nccl_communicator.h"

namespace marrow {
namespace {

bool checks_wanted(const CommunicatorOptions& options) {
  const char* variable = std::getenv("MARROW_DEBUG_COLLECTIVES");
  return options.checked.value_or(variable != nullptr && std::string_view(variable) == "1");
}

class Maker {
 public:
  Maker(const Mesh& mesh, Bootstrap& bootstrap, const CommunicatorOptions& options)
      : mesh_(mesh), bootstrap_(bootstrap), options_(options), checked_(checks_wanted(options)) {}

  // Every rank calls it with its own group, in the same order; an empty one takes no part.
  std::unique_ptr<Communicator> group(const std::string& name, const std::vector<int64_t>& ranks) const {
    if (options_.device.is_cuda()) {
      // All ranks take part in handing out the group's identity, members or not.
      const bool first = ranks.size() > 1 && ranks.front() == mesh_.rank;
      const std::vector<std::string> identities = bootstrap_.all_gather(first ? new_nccl_identity() : "");
      if (ranks.size() <= 1) return nullptr;
      const std::string& identity = identities[static_cast<size_t>(ranks.front())];
      return checked(ranks,
                     make_nccl_communicator(name, ranks, mesh_.rank, identity, options_.device, options_.records));
    }
    if (ranks.size() <= 1) return nullptr;
    return checked(ranks, make_mpi_communicator(name, ranks, options_.records));
  }

  // NCCL connects two ranks at their first transfer, and the host of each waits there for the other: with a
  // receive that is posted ahead on both sides it would wait for ever.
  void connect(Communicator& link) const {
    const at::Tensor values = at::zeros({2}, at::TensorOptions(options_.device).dtype(at::kFloat));
    const int64_t peer = 1 - link.rank();
    link.exchange(values.narrow(0, 0, 1), peer, values.narrow(0, 1, 1), peer).wait();
  }

  // The link of p and p + 1 in which this rank is lower (or upper) end, even p first: no chain of waiting.
  std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> links(const std::string& name) const {
    const auto neighbour = [&](int64_t p) { return mesh_.rank_at(p, mesh_.d, mesh_.c, mesh_.e); };
    std::unique_ptr<Communicator> above, below;
    for (const int64_t parity : {0, 1}) {
      const bool lower = mesh_.p % 2 == parity;
      const int64_t p = lower ? mesh_.p : mesh_.p - 1;
      const bool exists = p >= 0 && p + 1 < mesh_.shape.pp;
      std::unique_ptr<Communicator>& link = lower ? above : below;
      link = group(name, exists ? std::vector{neighbour(p), neighbour(p + 1)} : std::vector<int64_t>{});
      if (link != nullptr && options_.device.is_cuda()) connect(*link);
    }
    return {std::move(above), std::move(below)};
  }

 private:
  std::unique_ptr<Communicator> checked(const std::vector<int64_t>& ranks, std::unique_ptr<Communicator> made) const {
    return checked_ ? make_checked_communicator(std::move(made), ranks, options_.device) : std::move(made);
  }
  const Mesh& mesh_;
  Bootstrap& bootstrap_;
  const CommunicatorOptions& options_;
  bool checked_;
};

}  // namespace

MeshCommunicators make_mesh_communicators(const Mesh& mesh, Bootstrap& bootstrap, const CommunicatorOptions& options) {
  MARROW_CHECK(mesh.shape.world() == bootstrap.size(), ExitCode::kUsage, Fix("start as many processes as [mesh] has"),
               "a mesh of {} ranks for {} processes", mesh.shape.world(), bootstrap.size());
  MeshCommunicators made;
  if (bootstrap.size() == 1) return made;
  MARROW_CHECK(
      options.device.is_cuda() || bootstrap.is_mpi(), ExitCode::kUsage,
      Fix("start it with mpirun, or with marrow pretrain RUN.toml --processes N; or set train.device = \"gpu\""),
      "{} processes on CPUs need MPI, and were started without it", bootstrap.size());
  const Maker make(mesh, bootstrap, options);
  std::vector<int64_t> world(static_cast<size_t>(bootstrap.size()));
  std::iota(world.begin(), world.end(), int64_t{0});
  made.world = make.group("world", world);
  made.expert = make.group("expert", mesh.expert_group());
  made.context = make.group("context", mesh.context_group());
  made.dense_shard = make.group("dense_shard", mesh.dense_shard_group());
  made.expert_shard = make.group("expert_shard", mesh.expert_shard_group());
  made.replica = make.group("replica", mesh.replica_group());
  std::tie(made.to_next, made.from_previous) = make.links("up");
  std::tie(made.from_next, made.to_previous) = make.links("down");
  return made;
}

}  // namespace marrow
