#include "parallel/communicator.h"

#include <exception>
#include <numeric>

namespace marrow {

PendingTransfer& PendingTransfer::operator=(PendingTransfer&& other) noexcept {
  if (this == &other) return *this;
  const PendingTransfer previous(std::move(*this));  // waits at the end of this function
  wait_ = std::exchange(other.wait_, nullptr);
  tensors_ = std::exchange(other.tensors_, {});
  return *this;
}

PendingTransfer::~PendingTransfer() {
  if (!pending()) return;
  if (std::uncaught_exceptions() > 0) {
    // The run is ending: a peer may never come, and must not write into freed memory if it does.
    (void)std::make_unique<PendingTransfer>(std::move(*this)).release();
    return;
  }
  try {
    wait();
  } catch (...) {
  }
}

void PendingTransfer::wait() {
  if (!pending()) return;
  const std::function<void()> wait = std::exchange(wait_, nullptr);
  try {
    wait();
  } catch (...) {
    (void)std::make_unique<std::vector<at::Tensor>>(std::move(tensors_)).release();  // as in the destructor
    throw;
  }
  tensors_.clear();
}

const char* Operation::name() const {
  constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                    "send",       "receive",    "exchange"};
  return kNames[kind];
}

Communicator::Communicator(std::string name, std::vector<int64_t> ranks, int64_t world_rank)
    : name_(std::move(name)),
      ranks_(std::move(ranks)),
      rank_(std::find(ranks_.begin(), ranks_.end(), world_rank) - ranks_.begin()) {}

size_t Communicator::sum_dtype(const Tensor& values) {
  constexpr std::array kSummed{at::kFloat, at::kDouble, at::kInt, at::kLong};
  const size_t place = std::ranges::find(kSummed, values.scalar_type()) - kSummed.begin();
  MARROW_CHECK(place < kSummed.size(), ExitCode::kDeviceFault, Fix("reduce in fp32, fp64, int32 or int64"),
               "cannot sum tensors of {}", at::toString(values.scalar_type()));
  return place;
}

int64_t Communicator::row_bytes(const Tensor& values) {
  return c10::multiply_integers(values.sizes().slice(1)) * values.element_size();
}

std::vector<int64_t> Communicator::row_starts(const Tensor& values, Counts rows) const {
  std::vector<int64_t> first(rows.size());
  std::exclusive_scan(rows.begin(), rows.end(), first.begin(), int64_t{0});
  const int64_t total = rows.empty() ? 0 : first.back() + rows.back();
  MARROW_CHECK(std::ssize(rows) == size() && total == values.size(0), ExitCode::kDeviceFault,
               Fix("a defect of the caller's counts"),
               "all_to_all in group {}: {} counts with {} rows in total for {} ranks and a tensor of {} rows", name_,
               rows.size(), total, size(), values.size(0));
  return first;
}

}  // namespace marrow
