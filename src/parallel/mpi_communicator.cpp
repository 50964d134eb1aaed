// Communicators and bootstrap over MPI.
#include <fmt/ranges.h>

#include "parallel/communicator.h"

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

#include "parallel/bootstrap.h"
#include "parallel/transfer_record.h"

namespace marrow {
namespace {

constexpr int64_t kMessageBytes = int64_t{1} << 30;  // MPI counts in int: larger ones go as several

std::string mpi_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  return {text.data(), static_cast<size_t>(length)};
}

void check_mpi(int code, const char* call) {
  MARROW_CHECK(code == MPI_SUCCESS, ExitCode::kDeviceFault,
               Fix("see RUN/ranks/first-error: another rank may have failed before"), "{}: {}", call, mpi_text(code));
}

// The MPI requests of one operation.
class Requests {
 public:
  Requests(const std::string& name, std::string_view operation, OperationSlot* slot, int64_t bytes)
      : name_(name), operation_(operation), slot_(slot) {
    if (slot_ != nullptr) slot_->begin(operation, bytes);
  }

  void send(const void* data, int64_t bytes, int64_t to, MPI_Comm comm, int tag) {
    for_each_part(bytes, kMessageBytes, [&](int64_t offset, int count) {
      const auto* from = static_cast<const char*>(data) + offset;
      check_mpi(MPI_Isend(from, count, MPI_BYTE, static_cast<int>(to), tag, comm, add(-1, 0)), "MPI_Isend");
    });
  }
  void receive(void* data, int64_t bytes, int64_t from, MPI_Comm comm, int tag) {
    for_each_part(bytes, kMessageBytes, [&](int64_t offset, int count) {
      auto* into = static_cast<char*>(data) + offset;
      check_mpi(MPI_Irecv(into, count, MPI_BYTE, static_cast<int>(from), tag, comm, add(from, count)), "MPI_Irecv");
    });
  }
  // body(offset, count, request) for parts of `elements`, of 8 bytes or less.
  template <typename Body>
  void collective(int64_t elements, const char* call, const Body& body) {
    for_each_part(elements, kMessageBytes / 8,
                  [&](int64_t offset, int count) { check_mpi(body(offset, count, add(-1, 0)), call); });
  }

  // True once all is done; false where that took longer than `limit` seconds (0: no limit).
  bool wait(double limit = 0) {
    if (slot_ != nullptr) slot_->waited_for = true;
    auto pause = std::chrono::microseconds(20);
    const auto start = std::chrono::steady_clock::now();
    for (int polls = 0; !done(); ++polls) {
      if (limit > 0 && std::chrono::steady_clock::now() - start > std::chrono::duration<double>(limit)) return false;
      if (polls < 20) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(pause);
        pause = std::min(pause * 5 / 4, std::chrono::microseconds(500));
      }
    }
    if (slot_ != nullptr) slot_->end_wait();
    return true;
  }
  // Ranks from which something has not come yet.
  std::vector<int64_t> silent() {
    std::vector<int64_t> ranks;
    for (size_t i = 0; i < requests_.size(); ++i) {
      int arrived = 0;
      MPI_Test(&requests_[i], &arrived, MPI_STATUS_IGNORE);
      if (arrived == 0 && expected_[i].from >= 0) ranks.push_back(expected_[i].from);
    }
    return ranks;
  }

 private:
  struct Expected {
    int64_t from = -1;  // < 0: not a receive
    int64_t bytes = 0;
  };
  template <typename Body>
  static void for_each_part(int64_t total, int64_t limit, const Body& body) {
    for (int64_t at = 0; at < total; at += limit) body(at, static_cast<int>(std::min(limit, total - at)));
  }
  MPI_Request* add(int64_t from, int64_t bytes) {
    expected_.push_back({from, bytes});
    return &requests_.emplace_back(MPI_REQUEST_NULL);
  }
  bool done() {
    int all = 0;
    statuses_.resize(requests_.size());
    const int code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &all, statuses_.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) check_mpi(code, operation_.c_str());
    for (size_t i = 0; i < statuses_.size() && (all != 0 || code != MPI_SUCCESS); ++i) check(i, code);
    return all != 0;
  }
  void check(size_t i, int code) const {
    const int error = code == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS;
    const bool failed = error != MPI_SUCCESS && error != MPI_ERR_PENDING;
    int64_t bytes = expected_[i].bytes;
    if (expected_[i].from >= 0 && code == MPI_SUCCESS) {
      int count = 0;
      MPI_Get_count(&statuses_[i], MPI_BYTE, &count);
      bytes = count;
    }
    MARROW_CHECK(!failed && bytes == expected_[i].bytes, ExitCode::kDeviceFault,
                 Fix("run again with MARROW_DEBUG_COLLECTIVES=1, which names the ranks that disagree"),
                 "{} in group {}, message of rank {} of it: {} bytes wanted, {}", operation_, name_, expected_[i].from,
                 expected_[i].bytes, failed ? mpi_text(error) : fmt::format("{} came", bytes));
  }

  std::string name_, operation_;
  OperationSlot* slot_;
  std::vector<MPI_Request> requests_;
  std::vector<Expected> expected_;
  std::vector<MPI_Status> statuses_;
};

class MpiBootstrap : public Bootstrap {
 public:
  explicit MpiBootstrap(double start_seconds) {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);  // it ends the process where it fails
    if (std::getenv(kLaunchedVariable) != nullptr) std::fputs(kStartedLine, stderr);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    start_seconds_ = start_seconds;
    find_local_ranks();
  }
  ~MpiBootstrap() override {
    if (std::uncaught_exceptions() == 0) MPI_Finalize();  // else it would wait for the other ranks
  }
  MpiBootstrap(const MpiBootstrap&) = delete;
  MpiBootstrap& operator=(const MpiBootstrap&) = delete;

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  bool is_mpi() const override { return true; }

  std::vector<std::string> all_gather(const std::string& bytes) override {
    std::vector<std::string> all(static_cast<size_t>(size_));
    std::vector<int64_t> lengths(all.size());
    const auto own = static_cast<int64_t>(bytes.size());
    const auto gather = [&](const void* mine, int64_t size, const auto& place, const auto& size_of) {
      Requests requests("bootstrap", "all_gather", slot_, size);
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        requests.send(mine, size, peer, comm_, 0);
        requests.receive(place(peer), size_of(peer), peer, comm_, 0);
      }
      if (!requests.wait(slot_ == nullptr ? start_seconds_ : 0)) fail_late(requests.silent());
    };
    gather(
        &own, sizeof own, [&](size_t r) { return &lengths[r]; }, [](size_t) { return sizeof(int64_t); });
    for (size_t r = 0; r < all.size(); ++r) all[r].resize(static_cast<size_t>(lengths[r]));
    gather(
        bytes.data(), own, [&](size_t r) { return all[r].data(); }, [&](size_t r) { return lengths[r]; });
    all[static_cast<size_t>(rank_)] = bytes;
    return all;
  }

 private:
  // All ranks that wait find the same: the lowest says so, the others only where it does not come to it.
  [[noreturn]] void fail_late(const std::vector<int64_t>& silent) const {
    bool lowest = true;
    for (int64_t rank = 0; rank < rank_; ++rank) lowest = lowest && std::ranges::count(silent, rank) > 0;
    if (!lowest) std::this_thread::sleep_for(std::chrono::seconds(5));
    MARROW_THROW(ExitCode::kDeviceFault, Fix("see whether these processes are stopped, or hang at their start"),
                 "all_gather of the start has not ended within {} s: {}", start_seconds_,
                 silent.empty() ? "a rank no longer takes what is sent to it"
                                : fmt::format("nothing came from rank {}", fmt::join(silent, ", ")));
  }
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
};

class MpiCommunicator : public Communicator {
 public:
  MpiCommunicator(const std::string& name, const std::vector<int64_t>& ranks, int64_t world_rank, RunRecords* records)
      : Communicator(name, ranks, world_rank), slot_(records == nullptr ? nullptr : records->add(name)) {
    const std::vector<int> members(ranks.begin(), ranks.end());
    MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    check_mpi(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &group), "MPI_Group_incl");
    if (slot_ != nullptr) slot_->begin_wait("connect", 0);
    check_mpi(MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &comm_), "MPI_Comm_create_group");
    if (slot_ != nullptr) slot_->end_wait();
    MPI_Group_free(&group);
    MPI_Group_free(&world);
  }
  ~MpiCommunicator() override {
    if (std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
  }

  PendingTransfer start(const Operation& operation) override {
    const at::Tensor& values = operation.values();
    const MPI_Datatype summed[] = {MPI_FLOAT, MPI_DOUBLE, MPI_INT32_T, MPI_INT64_T};
    const MPI_Datatype type = operation.sums() ? summed[sum_dtype(values)] : MPI_BYTE;
    auto requests = std::make_shared<Requests>(name_, operation.name(), slot_, static_cast<int64_t>(values.nbytes()));
    switch (operation.kind) {
      case Operation::kAllReduce:
        requests->collective(values.numel(), "MPI_Iallreduce", [&](int64_t at, int n, MPI_Request* request) {
          return MPI_Iallreduce(MPI_IN_PLACE, address(values, at), n, type, MPI_SUM, comm_, request);
        });
        break;
      case Operation::kReduceScatter:
        reduce_scatter(*requests, values, operation.sent_parts, type);
        break;
      case Operation::kAllGather:
        all_gather(*requests, values, operation.sent_parts);
        break;
      case Operation::kAllToAll:
        all_to_all(*requests, operation);
        break;
      default: {
        const auto& [sent, received] = std::tie(operation.sent, operation.received);
        if (received.defined()) {
          requests->receive(received.data_ptr(), static_cast<int64_t>(received.nbytes()), operation.from, comm_,
                            kDirect);
        }
        if (sent.defined()) {
          requests->send(sent.data_ptr(), static_cast<int64_t>(sent.nbytes()), operation.to, comm_, kDirect);
        }
      }
    }
    return {[requests = std::move(requests)] { requests->wait(); }, {operation.sent, operation.received}};
  }

 private:
  static constexpr int kDirect = 0, kGather = 1, kTotal = 2;  // tags: kinds of message never mix

  static void* address(const at::Tensor& values, int64_t element) {
    return static_cast<char*>(values.data_ptr()) + element * values.element_size();
  }

  void all_gather(Requests& requests, const at::Tensor& whole, Counts bounds) const {
    const auto bytes = [&](int64_t r) { return (bounds[r + 1] - bounds[r]) * whole.element_size(); };
    for (int64_t step = 1; step < size(); ++step) {
      const int64_t to = (rank_ + step) % size(), from = (rank_ - step + size()) % size();
      requests.receive(address(whole, bounds[from]), bytes(from), from, comm_, kGather);
      requests.send(address(whole, bounds[rank_]), bytes(rank_), to, comm_, kGather);
    }
  }

  void reduce_scatter(Requests& requests, const at::Tensor& whole, Counts bounds, MPI_Datatype type) const {
    for (int root = 0; root < size(); ++root) {
      const int64_t elements = bounds[root + 1] - bounds[root];
      requests.collective(elements, "MPI_Ireduce", [&](int64_t at, int count, MPI_Request* request) {
        void* data = address(whole, bounds[root] + at);
        return root == rank_ ? MPI_Ireduce(MPI_IN_PLACE, data, count, type, MPI_SUM, root, comm_, request)
                             : MPI_Ireduce(data, nullptr, count, type, MPI_SUM, root, comm_, request);
      });
    }
  }

  void all_to_all(Requests& requests, const Operation& operation) const {
    const auto& [kind, send, receive, send_rows, receive_rows, to_rank, from_rank] = operation;
    const std::vector<int64_t> sent = row_starts(send, send_rows), received = row_starts(receive, receive_rows);
    const int64_t width = row_bytes(send);
    char* into = static_cast<char*>(receive.data_ptr());
    const char* from = static_cast<const char*>(send.data_ptr());
    for (int64_t step = 1; step < size(); ++step) {
      const int64_t to = (rank_ + step) % size(), source = (rank_ - step + size()) % size();
      requests.receive(into + received[source] * width, receive_rows[source] * width, source, comm_, kTotal);
      requests.send(from + sent[to] * width, send_rows[to] * width, to, comm_, kTotal);
    }
    MARROW_CHECK(send_rows[rank_] == receive_rows[rank_], ExitCode::kDeviceFault,
                 Fix("a defect of the caller's counts"),
                 "all_to_all in group {}: rank {} of it sends itself {} rows and expects {}", name_, rank_,
                 send_rows[rank_], receive_rows[rank_]);
    if (const int64_t own = send_rows[rank_] * width; own > 0) {
      std::memcpy(into + received[rank_] * width, from + sent[rank_] * width, static_cast<size_t>(own));
    }
  }

  OperationSlot* slot_;
  MPI_Comm comm_ = MPI_COMM_NULL;
};

}  // namespace

std::unique_ptr<Bootstrap> make_mpi_bootstrap(double start_seconds) {
  return std::make_unique<MpiBootstrap>(start_seconds);
}

std::unique_ptr<Communicator> make_mpi_communicator(const std::string& name, const std::vector<int64_t>& ranks,
                                                    int64_t world_rank, RunRecords* records) {
  return std::make_unique<MpiCommunicator>(name, ranks, world_rank, records);
}

}  // namespace marrow
