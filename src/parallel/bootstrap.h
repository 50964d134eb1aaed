// How the processes of a run find each other, before there is any communicator.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace marrow {

struct OperationSlot;

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int64_t rank() const { return 0; }
  virtual int64_t size() const { return 1; }
  virtual bool is_mpi() const { return false; }
  // The bytes of every rank, by rank. Every rank calls it, with any number of bytes. Error: kDeviceFault.
  virtual std::vector<std::string> all_gather(const std::string& bytes) { return {bytes}; }
  std::string broadcast(const std::string& bytes, int64_t root);  // of rank `root`
  void barrier() { all_gather(""); }

  // Among the processes of one host, whose GPUs they share.
  int64_t local_rank() const { return local_rank_; }
  int64_t ranks_on_host() const { return ranks_on_host_; }
  // From here on the watchdog sees these operations too; nullptr ends it.
  void record_in(OperationSlot* slot) { slot_ = slot; }
  bool recorded() const { return slot_ != nullptr; }

 protected:
  void find_local_ranks();  // by the hosts' names; collective
  OperationSlot* slot_ = nullptr;
  double start_seconds_ = 600;  // until it is recorded, an operation that takes longer is an error
  int64_t local_rank_ = 0, ranks_on_host_ = 1;
};

// By the environment: MPI where mpirun (or srun --mpi=pmix) started this process; else c10d's rendezvous
// for RANK and WORLD_SIZE, or SLURM_PROCID and SLURM_NTASKS, at MASTER_ADDR and MASTER_PORT or in the new
// file MARROW_RENDEZVOUS_FILE of a shared file system; else one process, and nothing is initialised.
// Errors: kUsage where the launcher's numbers do not fit or name no meeting place, kDeviceFault where the
// others do not come within `start_seconds`.
std::unique_ptr<Bootstrap> make_bootstrap(double start_seconds = 600);

// Before CUDA starts: sets what CUDA and NCCL read from the environment.
void prepare_gpu_environment();

std::unique_ptr<Bootstrap> make_mpi_bootstrap(double start_seconds);                          // mpi_communicator.cpp
std::unique_ptr<Bootstrap> make_store_bootstrap(int64_t rank, int64_t size, double seconds);  // store_bootstrap.cpp

// What the other ranks throw where one failed: that one tells the error, they end with its exit code.
struct PeerFailure {
  int code = 0;
};

// Runs `body`, which must not communicate, on every rank. Where it throws on any rank, this throws on all:
// what the lowest such rank threw on that rank, PeerFailure on the others. So none waits for one that failed.
void run_together(Bootstrap& bootstrap, const std::function<void()>& body);

// Throws on every rank unless `text` (a config) is the same on all; names the first rank and line that differ.
void check_same_on_all_ranks(Bootstrap& bootstrap, const std::string& what, const std::string& text);

}  // namespace marrow
