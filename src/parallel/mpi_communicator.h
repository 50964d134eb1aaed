// Communicators of CPU tensors over MPI.
#pragma once
#include "parallel/communicator.h"

namespace marrow {

class RunRecords;

// A group of the world ranks `ranks`, ascending, each of which calls this. The process was started by
// mpirun, and make_bootstrap() has run. `records` (may be null) outlives the communicator. Nothing spins:
// wait() polls and sleeps, because there may be more ranks than cores. Any number of bytes goes.
std::unique_ptr<Communicator> make_mpi_communicator(const std::string& name, const std::vector<int64_t>& ranks,
                                                    RunRecords* records);

}  // namespace marrow
