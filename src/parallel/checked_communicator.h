// A communicator that first makes sure that all ranks mean the same operation and sizes.
#pragma once
#include "parallel/communicator.h"

namespace marrow {

// `world_ranks` are the members, for the errors (kDeviceFault), which name two ranks and what each wants.
// Collectives compare before they start, on every rank; point to point the receiver does, in wait().
std::unique_ptr<Communicator> make_checked_communicator(std::unique_ptr<Communicator> inner,
                                                        std::vector<int64_t> world_ranks, at::Device device);

}  // namespace marrow
