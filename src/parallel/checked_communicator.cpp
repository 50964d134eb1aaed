#include "parallel/communicator.h"

namespace marrow {
namespace {

Fix same_calls() {
  return Fix("a defect of the caller: all ranks of a group call the same operations with fitting sizes");
}

class CheckedCommunicator : public Communicator {
 public:
  CheckedCommunicator(std::unique_ptr<Communicator> inner, at::Device device)
      : Communicator(inner->name(), inner->world_ranks(), inner->world_ranks()[static_cast<size_t>(inner->rank())]),
        inner_(std::move(inner)),
        device_(device) {}

  PendingTransfer start(const Operation& operation) override {
    if (operation.kind < Operation::kSend) {
      agree(operation);
      return inner_->start(operation);
    }
    // A message goes behind one that says its size.
    const auto& [kind, sent, received, sent_parts, received_parts, to, from] = operation;
    const at::Tensor sent_size = size_message(sent), received_size = size_message(received);
    auto first = shared(inner_->start({kind, sent_size, received_size, {}, {}, to, from}));
    auto second = shared(inner_->start(operation));
    return {[this, first, second, received_size, received = received, from = from] {
              first->wait();
              if (received.defined()) check_message(received_size, received, from);
              second->wait();
            },
            {sent, received}};
  }

 private:
  static constexpr int64_t kFirst = 2;  // kind, bytes; then two lists of size + 1

  static std::shared_ptr<PendingTransfer> shared(PendingTransfer transfer) {
    return std::make_shared<PendingTransfer>(std::move(transfer));
  }
  at::Tensor size_message(const at::Tensor& values) const {
    if (!values.defined()) return {};
    return at::full({1}, static_cast<int64_t>(values.nbytes()), at::kLong).to(device_);
  }
  void check_message(const at::Tensor& size, const at::Tensor& values, int64_t from) const {
    const int64_t sent = size.cpu().item<int64_t>(), expected = static_cast<int64_t>(values.nbytes());
    MARROW_CHECK(sent == expected, ExitCode::kDeviceFault, same_calls(),
                 "message in group {}: rank {} sends {} bytes to rank {}, which expects {}", name_, ranks_[from], sent,
                 ranks_[rank_], expected);
  }

  // Gathers what each rank means; [size, kFirst + 2 (size + 1)]. Every rank finds the same disagreement.
  void agree(const Operation& operation) {
    const bool by_rows = operation.kind == Operation::kAllToAll;
    const int64_t width = kFirst + 2 * (size() + 1);
    std::vector<int64_t> bounds;
    for (int64_t r = 0; r <= size(); ++r) bounds.push_back(r * width);
    at::Tensor all = at::zeros({size(), width}, at::kLong);
    int64_t* mine = all.data_ptr<int64_t>() + rank_ * width;
    mine[0] = operation.kind;
    mine[1] = by_rows ? row_bytes(operation.sent) : static_cast<int64_t>(operation.sent.nbytes());
    for (const auto& parts : {operation.sent_parts, operation.received_parts}) {
      MARROW_CHECK(std::ssize(parts) <= size() + 1, ExitCode::kDeviceFault, same_calls(),
                   "{} in group {}: {} sizes for {} ranks", operation.name(), name_, parts.size(), size());
    }
    std::ranges::copy(operation.sent_parts, mine + kFirst);
    std::ranges::copy(operation.received_parts, mine + kFirst + size() + 1);
    all = all.to(device_);
    inner_->all_gather(all, bounds).wait();
    all = all.cpu();
    const auto rows = all.accessor<int64_t, 2>();
    for (int64_t r = 1; r < size(); ++r) {
      for (int64_t i = 0; i < (by_rows ? kFirst : width); ++i) {
        MARROW_CHECK(rows[r][i] == rows[0][i], ExitCode::kDeviceFault, same_calls(),
                     "group {}: rank {} calls {}, rank {} {}", name_, ranks_[0], describe(rows[0].data(), i), ranks_[r],
                     describe(rows[r].data(), i));
      }
    }
    for (int64_t from = 0; by_rows && from < size(); ++from) {
      for (int64_t to = 0; to < size(); ++to) {
        const int64_t sent = rows[from][kFirst + to], expected = rows[to][kFirst + size() + 1 + from];
        MARROW_CHECK(sent == expected, ExitCode::kDeviceFault, same_calls(),
                     "all_to_all in group {}: rank {} sends {} rows to rank {}, which expects {}", name_, ranks_[from],
                     sent, ranks_[to], expected);
      }
    }
  }
  static std::string describe(const int64_t* row, int64_t field) {
    const Operation operation{static_cast<Operation::Kind>(row[0])};
    const std::string call = fmt::format("{} of {} bytes{}", operation.name(), row[1],
                                         operation.kind == Operation::kAllToAll ? " a row" : "");
    if (field < 2) return call;
    return fmt::format("{} with bound {} at {}", call, field - kFirst, row[field]);
  }

  std::unique_ptr<Communicator> inner_;
  at::Device device_;
};

}  // namespace

std::unique_ptr<Communicator> make_checked_communicator(std::unique_ptr<Communicator> inner, at::Device device) {
  return std::make_unique<CheckedCommunicator>(std::move(inner), device);
}

}  // namespace marrow
