// Communicators of GPU tensors over NCCL.
#pragma once
#include "parallel/communicator.h"

namespace marrow {

class RunRecords;

// What the first rank of a group makes and all its members are given.
std::string new_nccl_identity();

// A group of the world ranks `ranks`, ascending, each of which calls this; `world_rank` is this one. It has
// a high-priority stream of its own. `records` (may be null) outlives the communicator. NCCL's own errors carry its
// last message.
std::unique_ptr<Communicator> make_nccl_communicator(const std::string& name, const std::vector<int64_t>& ranks,
                                                     int64_t world_rank, const std::string& identity, at::Device device,
                                                     RunRecords* records);

}  // namespace marrow
