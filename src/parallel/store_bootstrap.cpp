// The rendezvous of torchrun-like launchers and of SLURM, over c10d's stores.
#include "ops/pch.h"
// After the precompiled header:
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <csignal>

#include "parallel/bootstrap.h"
#include "parallel/transfer_record.h"

namespace marrow {
namespace {

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

c10::intrusive_ptr<c10d::Store> open_store(int64_t rank, int64_t size, std::chrono::milliseconds timeout) {
  if (const std::string file = variable("MARROW_RENDEZVOUS_FILE"); !file.empty()) {
    return c10::make_intrusive<c10d::FileStore>(file, static_cast<int>(size));
  }
  const std::string host = variable("MASTER_ADDR"), port = variable("MASTER_PORT");
  MARROW_CHECK(!host.empty() && !port.empty(), ExitCode::kUsage,
               Fix("set MASTER_ADDR and MASTER_PORT (a free port of the host of rank 0), or MARROW_RENDEZVOUS_FILE "
                   "to a new file on a shared file system; or start with mpirun"),
               "rank {} of {} processes, but MASTER_ADDR is {} and MASTER_PORT is {}", rank, size, json_quote(host),
               json_quote(port));
  char* end = nullptr;
  const long number = std::strtol(port.c_str(), &end, 10);
  MARROW_CHECK(*end == '\0' && number > 0 && number < 65536, ExitCode::kUsage,
               Fix("set MASTER_PORT to a number from 1 to 65535"), "MASTER_PORT is {}", json_quote(port));
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(number);
  // torchrun's agent may already serve there.
  options.isServer = rank == 0 && variable("TORCHELASTIC_USE_AGENT_STORE") != "True";
  options.numWorkers = static_cast<size_t>(size);
  options.waitWorkers = false;  // who has not come is known by what it has not set
  options.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

class StoreBootstrap : public Bootstrap {
 public:
  StoreBootstrap(int64_t rank, int64_t size, double seconds) : rank_(rank), size_(size) {
    start_seconds_ = seconds;
    const auto open = [&] { guarded([&] { store_ = open_store(rank, size, timeout()); }); };
    if (rank == 0) open();  // a server has threads, which must not take the signals
    sigset_t ending, before;
    sigemptyset(&ending);
    for (const int number : {SIGINT, SIGTERM}) sigaddset(&ending, number);
    pthread_sigmask(SIG_UNBLOCK, &ending, &before);  // nothing is there to save: they end the wait, and the process
    if (rank != 0) open();
    find_local_ranks();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~StoreBootstrap() override {
    if (std::uncaught_exceptions() > 0) return;
    try {  // rank 0 may be the server: it stays until all have read what they wanted
      store_->set(fmt::format("marrow/end/{}", rank_), std::vector<uint8_t>{1});
      for (int64_t r = 0; rank_ == 0 && r < size_; ++r) store_->get(fmt::format("marrow/end/{}", r));
    } catch (const std::exception&) {
    }
  }
  StoreBootstrap(const StoreBootstrap&) = delete;
  StoreBootstrap& operator=(const StoreBootstrap&) = delete;

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }

  std::vector<std::string> all_gather(const std::string& bytes) override {
    if (slot_ != nullptr) slot_->begin_wait("all_gather", static_cast<int64_t>(bytes.size()));
    store_->setTimeout(timeout());
    std::vector<std::string> all;
    guarded([&] {
      store_->set(key(rank_), std::vector<uint8_t>(bytes.begin(), bytes.end()));
      for (int64_t r = 0; r < size_; ++r) {
        const std::vector<uint8_t> got = store_->get(key(r));
        all.emplace_back(got.begin(), got.end());
      }
    });
    ++round_;
    if (slot_ != nullptr) slot_->end_wait();
    return all;
  }

 private:
  std::chrono::milliseconds timeout() const {
    constexpr double kWatched = 1e6;  // the watchdog ends it before
    return std::chrono::milliseconds(static_cast<int64_t>(1e3 * (slot_ ? kWatched : start_seconds_)));
  }
  std::string key(int64_t rank) const { return fmt::format("marrow/{}/{}", round_, rank); }
  void guarded(const std::function<void()>& body) const {
    try {
      body();
    } catch (const c10::Error& error) {
      MARROW_CHECK(
          slot_ == nullptr, ExitCode::kDeviceFault,
          Fix("see the first error of rank 0, which serves the store; start again: the run goes on from its last "
              "save"),
          "rank {} of {} lost the store of rank 0: {}", rank_, size_, error.what_without_backtrace());
      std::string who = "the store of rank 0";
      try {  // where it answers
        std::vector<int64_t> absent;
        for (int64_t r = 0; store_ && r < size_; ++r) {
          if (!store_->check({key(r)})) absent.push_back(r);
        }
        if (!absent.empty()) who = fmt::format("rank {}", fmt::join(absent, ", "));
      } catch (const std::exception&) {
      }
      MARROW_THROW(ExitCode::kDeviceFault,
                   Fix("check that all ranks were started, that MASTER_ADDR and MASTER_PORT (or "
                       "MARROW_RENDEZVOUS_FILE, a new file for each run) are the same for all and reachable"),
                   "rank {} of {} could not meet {} within {} s: {}", rank_, size_, who, start_seconds_,
                   error.what_without_backtrace());
    }
  }
  int64_t rank_, size_, round_ = 0;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

std::unique_ptr<Bootstrap> make_store_bootstrap(int64_t rank, int64_t size, double seconds) {
  return std::make_unique<StoreBootstrap>(rank, size, seconds);
}

}  // namespace marrow
