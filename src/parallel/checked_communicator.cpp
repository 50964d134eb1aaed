#include "parallel/checked_communicator.h"

namespace marrow {
namespace {

enum Kind : int64_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kAllToAll, kMessage };
constexpr std::array<const char*, 6> kNames = {"all_reduce",     "broadcast",  "all_gather",
                                               "reduce_scatter", "all_to_all", "message"};

Fix same_calls() {
  return Fix("a defect of the caller: all ranks of a group call the same operations with fitting sizes");
}

class CheckedCommunicator : public Communicator {
 public:
  CheckedCommunicator(std::unique_ptr<Communicator> inner, std::vector<int64_t> world_ranks, at::Device device)
      : inner_(std::move(inner)), world_ranks_(std::move(world_ranks)), device_(device) {}

  const std::string& name() const override { return inner_->name(); }
  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }

  PendingTransfer all_reduce(const at::Tensor& values) override {
    agree(kAllReduce, bytes(values));
    return inner_->all_reduce(values);
  }
  PendingTransfer broadcast(const at::Tensor& values, int64_t root) override {
    agree(kBroadcast, bytes(values), root);
    return inner_->broadcast(values, root);
  }
  PendingTransfer all_gather(const at::Tensor& whole, std::span<const int64_t> bounds) override {
    agree(kAllGather, bytes(whole), 0, bounds);
    return inner_->all_gather(whole, bounds);
  }
  PendingTransfer reduce_scatter(const at::Tensor& whole, std::span<const int64_t> bounds) override {
    agree(kReduceScatter, bytes(whole), 0, bounds);
    return inner_->reduce_scatter(whole, bounds);
  }
  PendingTransfer all_to_all(const at::Tensor& send, std::span<const int64_t> send_rows, const at::Tensor& receive,
                             std::span<const int64_t> receive_rows) override {
    const at::Tensor all = agree(kAllToAll, row_bytes(send), 0, send_rows, receive_rows);
    const auto rows = all.accessor<int64_t, 2>();
    for (int64_t from = 0; from < size(); ++from) {
      for (int64_t to = 0; to < size(); ++to) {
        const int64_t sent = rows[from][kFirst + to], expected = rows[to][kFirst + size() + 1 + from];
        MARROW_CHECK(sent == expected, ExitCode::kDeviceFault, same_calls(),
                     "all_to_all in group {}: rank {} sends {} rows to rank {}, which expects {}", name(),
                     world_ranks_[from], sent, world_ranks_[to], expected);
      }
    }
    return inner_->all_to_all(send, send_rows, receive, receive_rows);
  }

  PendingTransfer send(const at::Tensor& values, int64_t to) override {
    const at::Tensor header = message_header(values);
    auto first = shared(inner_->send(header, to)), second = shared(inner_->send(values, to));
    return {[first, second] { first->wait(), second->wait(); }, {values}};
  }
  PendingTransfer receive(const at::Tensor& values, int64_t from) override {
    const at::Tensor header = message_header(values).zero_();
    auto first = shared(inner_->receive(header, from)), second = shared(inner_->receive(values, from));
    return {[this, first, second, header, values, from] {
              first->wait();
              check_message(header, values, from);
              second->wait();
            },
            {values}};
  }
  PendingTransfer exchange(const at::Tensor& sent, int64_t to, const at::Tensor& received, int64_t from) override {
    const at::Tensor mine = message_header(sent), header = message_header(received).zero_();
    auto first = shared(inner_->exchange(mine, to, header, from));
    auto second = shared(inner_->exchange(sent, to, received, from));
    return {[this, first, second, header, received, from] {
              first->wait();
              check_message(header, received, from);
              second->wait();
            },
            {sent, received}};
  }

 private:
  static constexpr int64_t kFirst = 3;  // kind, bytes, root; then two lists of size + 1

  static int64_t bytes(const at::Tensor& values) { return static_cast<int64_t>(values.nbytes()); }
  static std::shared_ptr<PendingTransfer> shared(PendingTransfer transfer) {
    return std::make_shared<PendingTransfer>(std::move(transfer));
  }
  at::Tensor message_header(const at::Tensor& values) const {
    return at::full({1}, bytes(values), at::kLong).to(device_);
  }
  void check_message(const at::Tensor& header, const at::Tensor& values, int64_t from) const {
    const int64_t sent = header.cpu().item<int64_t>();
    MARROW_CHECK(sent == bytes(values), ExitCode::kDeviceFault, same_calls(),
                 "message in group {}: rank {} sends {} bytes to rank {}, which expects {}", name(), world_ranks_[from],
                 sent, world_ranks_[rank()], bytes(values));
  }

  // Gathers what each rank means; [size, kFirst + 2 (size + 1)]. Every rank finds the same disagreement.
  at::Tensor agree(Kind kind, int64_t bytes, int64_t root = 0, std::span<const int64_t> a = {},
                   std::span<const int64_t> b = {}) {
    const int64_t width = kFirst + 2 * (size() + 1);
    std::vector<int64_t> bounds;
    for (int64_t r = 0; r <= size(); ++r) bounds.push_back(r * width);
    at::Tensor all = at::zeros({size(), width}, at::kLong);
    int64_t* mine = all.data_ptr<int64_t>() + rank() * width;
    mine[0] = kind, mine[1] = bytes, mine[2] = root;
    std::copy(a.begin(), a.end(), mine + kFirst);
    std::copy(b.begin(), b.end(), mine + kFirst + size() + 1);
    all = all.to(device_);
    inner_->all_gather(all, bounds).wait();
    all = all.cpu();
    const auto rows = all.accessor<int64_t, 2>();
    const int64_t compared = kind == kAllToAll ? kFirst : width;
    for (int64_t r = 1; r < size(); ++r) {
      for (int64_t i = 0; i < compared; ++i) {
        MARROW_CHECK(rows[r][i] == rows[0][i], ExitCode::kDeviceFault, same_calls(),
                     "group {}: rank {} calls {}, rank {} {}", name(), world_ranks_[0], describe(rows[0].data(), i),
                     world_ranks_[r], describe(rows[r].data(), i));
      }
    }
    return all;
  }
  static std::string describe(const int64_t* row, int64_t field) {
    const std::string call = fmt::format("{} of {} bytes{}", kNames[static_cast<size_t>(row[0])], row[1],
                                         row[0] == kAllToAll ? " a row" : "");
    if (field < 2) return call;
    return field == 2 ? fmt::format("{} from {}", call, row[2])
                      : fmt::format("{} with bound {} at {}", call, field - kFirst, row[field]);
  }

  std::unique_ptr<Communicator> inner_;
  std::vector<int64_t> world_ranks_;
  at::Device device_;
};

}  // namespace

std::unique_ptr<Communicator> make_checked_communicator(std::unique_ptr<Communicator> inner,
                                                        std::vector<int64_t> world_ranks, at::Device device) {
  return std::make_unique<CheckedCommunicator>(std::move(inner), std::move(world_ranks), device);
}

}  // namespace marrow
