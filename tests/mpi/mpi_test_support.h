// For tests that run as several ranks of one mpirun.
#pragma once
#include "parallel/mesh_communicators.h"
#include "parallel/transfer_record.h"

namespace marrow {

Bootstrap& test_bootstrap();       // of this process; main.cpp
const std::string& test_folder();  // the same on all ranks; removed at the end

// Under mpirun the tests run on CPUs over MPI, under a torchrun-like launcher on GPUs over NCCL.
inline at::Device test_device() {
  if (test_bootstrap().is_mpi()) return at::kCPU;
  return {at::kCUDA, static_cast<c10::DeviceIndex>(test_bootstrap().local_rank())};
}
inline at::TensorOptions on_device(at::ScalarType type) { return at::TensorOptions(type).device(test_device()); }

}  // namespace marrow
