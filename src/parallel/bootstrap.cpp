#include "parallel/bootstrap.h"

#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "ops/pch.h"

namespace marrow {
namespace {

// A number that a launcher set, or -1.
int64_t number_from(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return -1;
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  MARROW_CHECK(*end == '\0' && value >= 0, ExitCode::kUsage, Fix(fmt::format("unset {}", name)),
               "the environment has {}={}, which is no number of a launcher", name, json_quote(text));
  return value;
}

}  // namespace

// CUDA reads its variable when it starts, NCCL at its first call. Few queues in hardware would let a
// kernel wait behind an unrelated one; multicast can put a host's GPUs out of service.
void prepare_gpu_environment() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
}

std::string Bootstrap::broadcast(const std::string& bytes, int64_t root) {
  return all_gather(rank() == root ? bytes : std::string()).at(static_cast<size_t>(root));
}

void Bootstrap::find_local_ranks() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  const std::vector<std::string> hosts = all_gather(name.data());
  const auto me = hosts.begin() + rank();
  local_rank_ = std::count(hosts.begin(), me, *me);
  ranks_on_host_ = std::count(hosts.begin(), hosts.end(), *me);
}

std::unique_ptr<Bootstrap> make_bootstrap(double start_seconds) {
  prepare_gpu_environment();
  const int64_t by_mpirun = std::max(number_from("OMPI_COMM_WORLD_SIZE"), number_from("PMI_SIZE"));
  int64_t rank = number_from("RANK"), size = number_from("WORLD_SIZE");
  if (by_mpirun > 0 || number_from("PMIX_RANK") >= 0) {
    std::unique_ptr<Bootstrap> mpi = make_mpi_bootstrap(start_seconds);
    MARROW_CHECK(mpi->size() == std::max(by_mpirun, mpi->size()), ExitCode::kUsage,
                 Fix("start it with Open MPI's mpirun, or with marrow pretrain RUN.toml --processes N"),
                 "the launcher started {} processes, but MPI sees {}: a launcher of another MPI", by_mpirun,
                 mpi->size());
    return mpi;
  }
  if (rank < 0 && size < 0) {
    rank = number_from("SLURM_PROCID");
    size = number_from("SLURM_NTASKS");
    if (rank < 0) size = -1;  // salloc's own shell
  }
  if (size <= 1) return std::make_unique<Bootstrap>();
  MARROW_CHECK(rank >= 0 && rank < size, ExitCode::kUsage,
               Fix("set RANK to 0 … WORLD_SIZE - 1, or unset WORLD_SIZE to run one process"),
               "the environment says rank {} of {} processes", rank, size);
  return make_store_bootstrap(rank, size, start_seconds);
}

void run_together(Bootstrap& bootstrap, const std::function<void()>& body) {
  std::exception_ptr failure;
  int code = 0;
  try {
    body();
  } catch (const Error& error) {
    failure = std::current_exception();
    code = static_cast<int>(error.report().code);
  } catch (...) {
    failure = std::current_exception();
    code = static_cast<int>(ExitCode::kDeviceFault);
  }
  const std::vector<std::string> codes = bootstrap.all_gather(code == 0 ? "" : std::to_string(code));
  const auto first = std::find_if(codes.begin(), codes.end(), [](const std::string& text) { return !text.empty(); });
  if (first == codes.end()) return;
  if (first - codes.begin() == bootstrap.rank()) {
    try {
      std::rethrow_exception(failure);
    } catch (Error& error) {  // of the start: later the rank's record says who it is
      if (bootstrap.size() > 1 && !bootstrap.recorded()) error.add_who(fmt::format("rank {}", bootstrap.rank()));
      throw;
    }
  }
  throw PeerFailure{std::stoi(*first)};
}

void check_same_on_all_ranks(Bootstrap& bootstrap, const std::string& what, const std::string& text) {
  const std::string expected = bootstrap.broadcast(text, 0);
  run_together(bootstrap, [&] {
    if (text == expected) return;
    std::istringstream mine(text), theirs(expected);
    std::string my_line, their_line;
    while (my_line == their_line) {
      if (!std::getline(mine, my_line)) my_line = "(its end)";
      if (!std::getline(theirs, their_line)) their_line = "(its end)";
    }
    MARROW_THROW(ExitCode::kUsage, Fix("start all ranks with the same files, options and environment"),
                 "{} differs between ranks: rank 0 has {}, rank {} has {}", what, json_quote(their_line),
                 bootstrap.rank(), json_quote(my_line));
  });
}

}  // namespace marrow
