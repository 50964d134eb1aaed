// Communicators over NCCL.
#include "parallel/communicator.h"

#ifndef MARROW_CUDA

namespace marrow {

std::string new_nccl_identity() {
  MARROW_THROW(ExitCode::kUsage, Fix("build with ./dev build --gpu, or set train.device = \"cpu\""),
               "this build has no NCCL");
}

std::unique_ptr<Communicator> make_nccl_communicator(const std::string&, const std::vector<int64_t>&, int64_t,
                                                     const std::string&, at::Device, RunRecords*) {
  new_nccl_identity();
  return nullptr;
}

}  // namespace marrow

#else

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <nccl.h>

#include <cstring>
#include <deque>
#include <exception>
#include <mutex>

#include "parallel/transfer_record.h"

namespace marrow {
namespace {

void check_nccl(ncclResult_t result, const char* call, const std::string& group, ncclComm_t comm) {
  MARROW_CHECK(result == ncclSuccess, ExitCode::kDeviceFault,
               Fix("see RUN/ranks/first-error: another rank may have failed before; NCCL_DEBUG=INFO shows more, "
                   "marrow doctor checks the GPUs"),
               "{} in group {}: {}; {}", call, group, ncclGetErrorString(result), ncclGetLastError(comm));
}

bool equal_ranges(std::span<const int64_t> bounds) {
  for (size_t r = 1; r + 1 < bounds.size(); ++r) {
    if (bounds[r + 1] - bounds[r] != bounds[1] - bounds[0]) return false;
  }
  return true;
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const std::string& name, const std::vector<int64_t>& ranks, int64_t world_rank,
                   const std::string& identity, at::Device device, RunRecords* records)
      : Communicator(name, ranks, world_rank),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())),
        records_(records),
        slot_(records != nullptr ? records->add(name) : &own_slot_) {
    const c10::cuda::CUDAGuard guard(device);
    ncclUniqueId id;
    MARROW_CHECK(identity.size() == sizeof id, ExitCode::kDeviceFault, Fix("start all ranks from one build"),
                 "group {}: an identity of {} bytes, {} wanted", name_, identity.size(), sizeof id);
    std::memcpy(&id, identity.data(), sizeof id);
    slot_->begin_wait("connect", 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    check_nccl(ncclCommInitRankConfig(&comm_, static_cast<int>(size()), id, static_cast<int>(rank_), &config),
               "ncclCommInitRankConfig", name_, nullptr);
    slot_->end_wait();
    if (records_ != nullptr) records_->set_probe(slot_, [this] { probe(); });
  }
  ~NcclCommunicator() override {
    if (records_ != nullptr) records_->set_probe(slot_, {});
    if (std::uncaught_exceptions() == 0) ncclCommDestroy(comm_);  // else it would wait for the other ranks
  }

  // Starts after what the current stream holds; wait() lets the then current stream wait for the end.
  PendingTransfer start(const Operation& operation) override {
    if (operation.sums()) reduction_type(operation.sent);  // an error here, not with a group open
    std::vector<int64_t> first_sent, first_received;
    if (operation.kind == Operation::kAllToAll) {
      first_sent = row_starts(operation.sent, operation.sent_parts);
      first_received = row_starts(operation.received, operation.received_parts);
    }
    const c10::cuda::CUDAGuard guard(stream_.device());
    at::cuda::CUDAEvent ready;
    ready.record(at::cuda::getCurrentCUDAStream(stream_.device_index()));
    ready.block(stream_);
    check_nccl(ncclGroupStart(), "ncclGroupStart", name_, comm_);
    const ncclResult_t result = issue(operation, first_sent, first_received);
    const ncclResult_t end = ncclGroupEnd();
    check_nccl(result != ncclSuccess ? result : end, operation.name(), name_, comm_);
    auto done = std::make_shared<at::cuda::CUDAEvent>();
    done->record(stream_);
    {
      const std::lock_guard lock(mutex_);
      slot_->begin(operation.name(), static_cast<int64_t>(operation.values().nbytes()));
      in_flight_.push_back(done);
      retire();
    }
    return {[done] { done->block(at::cuda::getCurrentCUDAStream(done->device_index())); },
            {operation.sent, operation.received}};
  }

 private:
  static ncclDataType_t reduction_type(const at::Tensor& values) {
    constexpr ncclDataType_t kTypes[] = {ncclFloat32, ncclFloat64, ncclInt32, ncclInt64};
    return kTypes[sum_dtype(values)];
  }
  static size_t count(int64_t elements) { return static_cast<size_t>(elements); }
  static char* at(const at::Tensor& values, int64_t element) {
    return static_cast<char*>(values.data_ptr()) + element * values.element_size();
  }

  ncclResult_t issue(const Operation& operation, const std::vector<int64_t>& first_sent,
                     const std::vector<int64_t>& first_received) {
    const at::Tensor &sent = operation.sent, &received = operation.received;
    switch (operation.kind) {
      case Operation::kAllReduce:
        return ncclAllReduce(sent.data_ptr(), sent.data_ptr(), count(sent.numel()), reduction_type(sent), ncclSum,
                             comm_, stream_);
      case Operation::kAllGather:
        return all_gather(sent, operation.sent_parts);
      case Operation::kReduceScatter:
        return reduce_scatter(sent, operation.sent_parts);
      case Operation::kAllToAll:
        return all_to_all(operation, first_sent, first_received);
      default:  // the group reports the first of their errors
        if (sent.defined()) send_bytes(sent.data_ptr(), sent.nbytes(), operation.to);
        if (received.defined()) receive_bytes(received.data_ptr(), received.nbytes(), operation.from);
        return ncclSuccess;
    }
  }
  ncclResult_t all_gather(const at::Tensor& whole, Counts bounds) {
    const int64_t width = whole.element_size();
    if (equal_ranges(bounds)) {
      return ncclAllGather(at(whole, bounds[rank_]), at(whole, bounds[0]), count((bounds[1] - bounds[0]) * width),
                           ncclUint8, comm_, stream_);
    }
    return each_range(bounds, [&](int64_t begin, int64_t elements, int64_t root) {
      return ncclBroadcast(at(whole, begin), at(whole, begin), count(elements * width), ncclUint8,
                           static_cast<int>(root), comm_, stream_);
    });
  }
  ncclResult_t reduce_scatter(const at::Tensor& whole, Counts bounds) {
    const ncclDataType_t type = reduction_type(whole);
    if (equal_ranges(bounds)) {
      return ncclReduceScatter(at(whole, bounds[0]), at(whole, bounds[rank_]), count(bounds[1] - bounds[0]), type,
                               ncclSum, comm_, stream_);
    }
    return each_range(bounds, [&](int64_t begin, int64_t elements, int64_t root) {
      return ncclReduce(at(whole, begin), at(whole, begin), count(elements), type, ncclSum, static_cast<int>(root),
                        comm_, stream_);
    });
  }
  ncclResult_t all_to_all(const Operation& operation, const std::vector<int64_t>& first_sent,
                          const std::vector<int64_t>& first_received) {
    const int64_t width = row_bytes(operation.sent);
    const auto* from = static_cast<const char*>(operation.sent.data_ptr());
    auto* into = static_cast<char*>(operation.received.data_ptr());
    for (int64_t peer = 0; peer < size(); ++peer) {  // the group reports the first of their errors
      const int64_t sent = operation.sent_parts[peer] * width, received = operation.received_parts[peer] * width;
      if (sent > 0) send_bytes(from + first_sent[peer] * width, count(sent), peer);
      if (received > 0) receive_bytes(into + first_received[peer] * width, count(received), peer);
    }
    return ncclSuccess;
  }

  ncclResult_t send_bytes(const void* data, size_t size, int64_t to) {
    return ncclSend(data, size, ncclUint8, static_cast<int>(to), comm_, stream_);
  }
  ncclResult_t receive_bytes(void* data, size_t size, int64_t from) {
    return ncclRecv(data, size, ncclUint8, static_cast<int>(from), comm_, stream_);
  }
  template <typename Body>
  ncclResult_t each_range(std::span<const int64_t> bounds, const Body& body) {
    for (int64_t r = 0; r < size(); ++r) {
      if (bounds[r + 1] == bounds[r]) continue;
      if (const ncclResult_t result = body(bounds[r], bounds[r + 1] - bounds[r], r); result != ncclSuccess)
        return result;
    }
    return ncclSuccess;
  }

  // With mutex_ held: what the GPU has finished is over.
  void retire() {
    while (!in_flight_.empty() && in_flight_.front()->query()) {
      in_flight_.pop_front();
      slot_->end();
    }
    slot_->waited_for = !in_flight_.empty();
  }
  void probe() {  // by the watchdog's thread
    const std::lock_guard lock(mutex_);
    retire();
    ncclResult_t state = ncclSuccess;
    check_nccl(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError", name_, comm_);
    check_nccl(state == ncclInProgress ? ncclSuccess : state, slot_->operation, name_, comm_);
  }

  c10::cuda::CUDAStream stream_;
  ncclComm_t comm_ = nullptr;
  RunRecords* records_;
  OperationSlot own_slot_;
  OperationSlot* slot_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<at::cuda::CUDAEvent> > in_flight_;  // events of unfinished operations, in order
};

}  // namespace

std::string new_nccl_identity() {
  ncclUniqueId id;
  check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId", "(new)", nullptr);
  return {reinterpret_cast<const char*>(&id), sizeof id};
}

std::unique_ptr<Communicator> make_nccl_communicator(const std::string& name, const std::vector<int64_t>& ranks,
                                                     int64_t world_rank, const std::string& identity, at::Device device,
                                                     RunRecords* records) {
  return std::make_unique<NcclCommunicator>(name, ranks, world_rank, identity, device, records);
}

}  // namespace marrow

#endif
