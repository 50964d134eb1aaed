// Every communicator of a rank, made in one place.
#pragma once
#include "parallel/bootstrap.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"

namespace marrow {

class RunRecords;

// Null where the group is this rank alone. The four links join this rank with its neighbours in the
// pipeline (p ± 1, the ends are not joined); in each the lower p is rank 0 and the higher rank 1, and
// what goes up has another link than what goes down, so that neither order waits for the other.
struct MeshCommunicators {
  std::unique_ptr<Communicator> world, expert, context, dense_shard, expert_shard, replica;
  std::unique_ptr<Communicator> to_next,
      from_previous;  // p -> p + 1: to_next sends to 1, from_previous receives from 0
  std::unique_ptr<Communicator> to_previous,
      from_next;  // p -> p - 1: to_previous sends to 0, from_next receives from 1
};

struct CommunicatorOptions {
  at::Device device = at::kCPU;
  RunRecords* records = nullptr;  // what the watchdog sees; outlives the communicators
  // Every operation first compares with its peers what it is and its sizes, and an error names the ranks
  // that disagree: slow. By default, where MARROW_DEBUG_COLLECTIVES is 1.
  std::optional<bool> checked;
};

// Every rank calls it. Errors: kUsage for several CPU processes without MPI, or without NCCL in the build.
MeshCommunicators make_mesh_communicators(const Mesh& mesh, Bootstrap& bootstrap, const CommunicatorOptions& options);

}  // namespace marrow
