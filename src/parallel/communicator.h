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

// One group of ranks, on one kind of device. Every rank of the group calls the same operations in the
// same order with fitting sizes. An operation starts after what the current stream holds so far (GPU)
// and runs on a stream of the communicator's own; those of one communicator run in the order of the
// calls. Tensors are contiguous, of the communicator's device, and are neither written nor, where the
// operation writes them, read before wait(). Reductions are sums in the tensors' dtype: fp32, fp64,
// int32 or int64; all else moves any dtype.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual const std::string& name() const = 0;  // "expert", as errors and the watchdog's table show it
  virtual int64_t rank() const = 0;             // in this group
  virtual int64_t size() const = 0;

  virtual PendingTransfer all_reduce(const at::Tensor& values) = 0;  // in place
  virtual PendingTransfer broadcast(const at::Tensor& values, int64_t root) = 0;
  // Element ranges [bounds[r], bounds[r + 1]) of `whole` belong to rank r; bounds has size() + 1
  // entries. all_gather: each rank has filled its own range; all ranges afterwards. reduce_scatter:
  // the sum over ranks of one's own range, in place; the other ranges are undefined afterwards.
  virtual PendingTransfer all_gather(const at::Tensor& whole, std::span<const int64_t> bounds) = 0;
  virtual PendingTransfer reduce_scatter(const at::Tensor& whole, std::span<const int64_t> bounds) = 0;
  // Rows (of dimension 0) for rank r lie in `send` after those for ranks below r; received rows lie
  // likewise in `receive`. Counts of zero are normal.
  virtual PendingTransfer all_to_all(const at::Tensor& send, std::span<const int64_t> send_rows,
                                     const at::Tensor& receive, std::span<const int64_t> receive_rows) = 0;
  // Point to point: messages between two ranks arrive in the order of sending. exchange() is a send
  // and a receive that go on at the same time (a step round a ring): a send may wait for its receive, so
  // that two ranks that both send first would wait for ever.
  virtual PendingTransfer send(const at::Tensor& values, int64_t to) = 0;
  virtual PendingTransfer receive(const at::Tensor& values, int64_t from) = 0;
  virtual PendingTransfer exchange(const at::Tensor& sent, int64_t to, const at::Tensor& received, int64_t from) = 0;
};

// For implementations of all_to_all: bytes of a row of dimension 0, and the first row of each rank, after
// checking that `rows` has an entry for each rank and sums to the rows of `values`.
int64_t row_bytes(const at::Tensor& values);
std::vector<int64_t> row_starts(const Communicator& group, const at::Tensor& values, std::span<const int64_t> rows);

}  // namespace marrow
