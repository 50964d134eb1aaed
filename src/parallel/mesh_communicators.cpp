#include "parallel/mesh_communicators.h"

#include <numeric>

namespace marrow {
namespace {

bool checks_wanted(const CommunicatorOptions& options) {
  const char* variable = std::getenv("MARROW_DEBUG_COLLECTIVES");
  return options.checked.value_or(variable != nullptr && std::string_view(variable) == "1");
}

// NCCL connects two ranks at their first transfer, and the host of each waits there for the other. Here both are at it;
// in a step one may be in another link's first transfer, or wait for a kernel.
void connect(Communicator& link, at::Device device) {
  const at::Tensor values = at::zeros({2}, at::TensorOptions(device).dtype(at::kFloat));
  const int64_t peer = 1 - link.rank();
  link.exchange(values.narrow(0, 0, 1), peer, values.narrow(0, 1, 1), peer).wait();
}

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
  const bool checked = checks_wanted(options), on_gpu = options.device.is_cuda();
  // Every rank calls it with its own group, in the same order; an empty one takes no part.
  const auto group = [&](const char* name, const std::vector<int64_t>& ranks) -> std::unique_ptr<Communicator> {
    std::vector<std::string> identities;  // of all ranks' groups, members or not
    if (on_gpu) {
      const bool first = ranks.size() > 1 && ranks.front() == mesh.rank;
      identities = bootstrap.all_gather(first ? new_nccl_identity() : "");
    }
    if (ranks.size() <= 1) return nullptr;
    auto inner = on_gpu ? make_nccl_communicator(name, ranks, mesh.rank, identities[static_cast<size_t>(ranks.front())],
                                                 options.device, options.records)
                        : make_mpi_communicator(name, ranks, mesh.rank, options.records);
    return checked ? make_checked_communicator(std::move(inner), options.device) : std::move(inner);
  };
  // The link of p and p + 1 in which this rank is lower (or upper) end, even p first: no chain of waiting.
  const std::vector<int64_t> line = mesh.pipeline_group();
  const auto links = [&](const char* name, std::unique_ptr<Communicator>& above, std::unique_ptr<Communicator>& below) {
    for (const int64_t parity : {0, 1}) {
      const bool lower = mesh.p % 2 == parity;
      const int64_t p = lower ? mesh.p : mesh.p - 1;
      const bool exists = p >= 0 && p + 1 < mesh.shape.pp;
      std::unique_ptr<Communicator>& link = lower ? above : below;
      link = group(name, exists ? std::vector{line[p], line[p + 1]} : std::vector<int64_t>{});
      if (link != nullptr && on_gpu) connect(*link, options.device);
    }
  };
  std::vector<int64_t> world(static_cast<size_t>(bootstrap.size()));
  std::iota(world.begin(), world.end(), int64_t{0});
  made.world = group("world", world);
  made.expert = group("expert", mesh.expert_group());
  made.context = group("context", mesh.context_group());
  made.dense_shard = group("dense_shard", mesh.dense_shard_group());
  made.expert_shard = group("expert_shard", mesh.expert_shard_group());
  made.replica = group("replica", mesh.replica_group());
  links("up", made.to_next, made.from_previous);
  links("down", made.from_next, made.to_previous);
  return made;
}

}  // namespace marrow
