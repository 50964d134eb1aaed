// Collective and point-to-point operations among the ranks of one group.
#pragma once
#include "ops/pch.h"

namespace marrow {

// An operation under way. Keeps its tensors alive until wait() returned; on a GPU the caller's
// stream waits, not the host, so what follows on that stream may use (and free) the tensors.
class PendingTransfer {
 public:
  PendingTransfer() = default;
  PendingTransfer(std::function<void()> wait, std::vector<at::Tensor> tensors)
      : wait_(std::move(wait)), tensors_(std::move(tensors)) {}
  PendingTransfer(PendingTransfer&&) noexcept = default;
  PendingTransfer& operator=(PendingTransfer&& other) noexcept;  // `other` must not overwrite a transfer under way
  ~PendingTransfer();                                            // waits, and swallows errors: call wait() yourself

  void wait();  // errors: kDeviceFault. A second call, or one of an empty transfer, does nothing
  bool pending() const { return static_cast<bool>(wait_); }

 private:
  std::function<void()> wait_;
  std::vector<at::Tensor> tensors_;
};

// What a communicator is asked for: see the functions of the same names.
struct Operation {
  enum Kind { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kSend, kReceive, kExchange };
  Kind kind = kAllReduce;
  at::Tensor sent = {}, received = {};  // of kAllReduce to kReduceScatter: one tensor, in place
  std::span<const int64_t> sent_parts = {}, received_parts = {};  // bounds of ranges; rows for and from each rank
  int64_t to = -1, from = -1;

  const char* name() const;
  const at::Tensor& values() const { return sent.defined() ? sent : received; }
  bool sums() const { return kind == kAllReduce || kind == kReduceScatter; }
};

// One group of ranks, on one kind of device. Every rank of the group calls the same operations in the same order with
// fitting sizes. On a GPU an operation starts after what the current stream holds so far and runs on a stream of the
// communicator's own, one after the other. Tensors are contiguous, of its device, and are neither written nor, where
// the operation writes them, read before wait(). Sums are in the tensors' dtype; all else moves any dtype.
class Communicator {
 public:
  // `ranks`: the members' ranks in the world, ascending; `world_rank` is this one.
  Communicator(std::string name, std::vector<int64_t> ranks, int64_t world_rank);
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  const std::string& name() const { return name_; }  // "expert", as errors and the watchdog's table show it
  const std::vector<int64_t>& world_ranks() const { return ranks_; }
  int64_t rank() const { return rank_; }  // in this group
  int64_t size() const { return std::ssize(ranks_); }

  using Tensor = at::Tensor;
  using Counts = std::span<const int64_t>;
  // In place.
  PendingTransfer all_reduce(const Tensor& values) { return start({Operation::kAllReduce, values, values}); }
  // Element ranges [bounds[r], bounds[r + 1]) of `whole` belong to rank r; bounds has size() + 1
  // entries. all_gather: each rank has filled its own range; all ranges afterwards. reduce_scatter:
  // the sum over ranks of one's own range, in place; the other ranges are undefined afterwards.
  PendingTransfer all_gather(const Tensor& whole, Counts bounds) {
    return start({Operation::kAllGather, whole, whole, bounds});
  }
  PendingTransfer reduce_scatter(const Tensor& whole, Counts bounds) {
    return start({Operation::kReduceScatter, whole, whole, bounds});
  }
  // Rows (of dimension 0) for rank r lie in `send` after those for ranks below r; received rows lie
  // likewise in `receive`. Counts of zero are normal.
  PendingTransfer all_to_all(const Tensor& send, Counts send_rows, const Tensor& receive, Counts receive_rows) {
    return start({Operation::kAllToAll, send, receive, send_rows, receive_rows});
  }
  // Point to point: messages between two ranks arrive in the order of sending. exchange() is a send
  // and a receive that go on at the same time (a step round a ring): a send may wait for its receive, so
  // that two ranks that both send first would wait for ever.
  PendingTransfer send(const Tensor& values, int64_t to) { return start({Operation::kSend, values, {}, {}, {}, to}); }
  PendingTransfer receive(const Tensor& values, int64_t from) {
    return start({Operation::kReceive, {}, values, {}, {}, -1, from});
  }
  PendingTransfer exchange(const Tensor& sent, int64_t to, const Tensor& received, int64_t from) {
    return start({Operation::kExchange, sent, received, {}, {}, to, from});
  }
  virtual PendingTransfer start(const Operation& operation) = 0;

 protected:
  // Of an all_to_all: bytes of a row, and the first row of each rank; checks that `rows` fits the ranks and `values`.
  static int64_t row_bytes(const Tensor& values);
  std::vector<int64_t> row_starts(const Tensor& values, Counts rows) const;
  // The place of the tensor's dtype among those that are summed: fp32, fp64, int32, int64.
  static size_t sum_dtype(const Tensor& values);

  std::string name_;
  std::vector<int64_t> ranks_;
  int64_t rank_;
};

class RunRecords;
// Communicators of a group whose ranks all call this; `records` (may be null) outlives them. On the CPU over MPI: the
// process was started by mpirun, and make_bootstrap() has run. Nothing spins: wait() polls and sleeps, because there
// may be more ranks than cores. Any number of bytes goes.
std::unique_ptr<Communicator> make_mpi_communicator(const std::string& name, const std::vector<int64_t>& ranks,
                                                    int64_t world_rank, RunRecords* records);
// On GPUs over NCCL, each with a high-priority stream; errors carry NCCL's last message. `identity`: the first rank's.
std::string new_nccl_identity();
std::unique_ptr<Communicator> make_nccl_communicator(const std::string& name, const std::vector<int64_t>& ranks,
                                                     int64_t world_rank, const std::string& identity, at::Device device,
                                                     RunRecords* records);
// One that first makes sure that all ranks mean the same operation and sizes. Errors (kDeviceFault) name two ranks and
// what each wants. Collectives compare before they start, on every rank; point to point the receiver does, in wait().
std::unique_ptr<Communicator> make_checked_communicator(std::unique_ptr<Communicator> inner, at::Device device);

}  // namespace marrow
