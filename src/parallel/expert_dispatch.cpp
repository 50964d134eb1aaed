#include "parallel/expert_dispatch.h"

#include <numeric>
#include <tuple>

#include "ops/rows.h"

namespace marrow {
namespace {

int64_t total(const std::vector<int64_t>& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

}  // namespace

void ExpertDispatch::plan(const at::Tensor& choices, const at::Tensor& counts) {
  const at::NoGradGuard no_grad;
  choices_ = choices;
  group_->size() == 2 ? plan_whole() : plan_counted(counts);
}

// Row r·T + t is token t's for rank r.
void ExpertDispatch::plan_whole() {
  const int64_t tokens = choices_.size(0);
  const at::Tensor row = at::arange(2 * tokens, choices_.options());
  map_ = {row.remainder(std::max<int64_t>(tokens, 1)), row.view({2, tokens}).t().contiguous()};
  sent_ = received_ = {tokens, tokens};
  expert_rows_ = 2 * choices_.numel();
}

// A row for each (token, rank) that has a pair. Every rank learns of all where each rank's rows end, and its pairs.
void ExpertDispatch::plan_counted(const at::Tensor& counts) {
  const int64_t ranks = group_->size();
  const ExpertPermutation rows = rank_permutation(choices_, ranks, experts_ / ranks);
  map_ = rows.map;
  const at::Tensor pairs = counts.view({-1, ranks, experts_ / ranks}).sum(at::IntArrayRef({0, 2}), false, at::kInt);
  const at::Tensor all = at::empty({ranks, 2 * ranks}, choices_.options());
  at::Tensor own = all.select(0, group_->rank());
  at::cat_out(own, {rows.offsets, pairs});
  std::vector<int64_t> bounds;
  for (int64_t r = 0; r <= ranks; ++r) bounds.push_back(r * 2 * ranks);
  group_->all_gather(all.view(-1), bounds).wait();
  counts_.emplace(all);
}

void ExpertDispatch::await_counts() {
  if (!counts_) return;
  const std::vector<double> counts = counts_->values();
  counts_.reset();
  const auto ranks = static_cast<size_t>(group_->size()), own = static_cast<size_t>(group_->rank());
  const auto rows = [&](size_t from, size_t to) {
    const double* ends = counts.data() + 2 * ranks * from;
    return static_cast<int64_t>(ends[to] - (to == 0 ? 0 : ends[to - 1]));
  };
  for (size_t r = 0; r < ranks; ++r) {
    sent_.push_back(rows(own, r));
    received_.push_back(rows(r, own));
    expert_rows_ += static_cast<int64_t>(counts[2 * ranks * r + ranks + own]);
  }
}

// Starts to move `rows` to where the dispatch went, or back; finish() gives what arrived.
void ExpertDispatch::start(const at::Tensor& rows, bool back) {
  const auto& [from, to] = back ? std::tie(received_, sent_) : std::tie(sent_, received_);
  std::vector<int64_t> shape = rows.sizes().vec();
  shape[0] = total(to);
  const at::Tensor arriving = at::empty(shape, rows.options());
  keep(group_->all_to_all(rows.contiguous(), from, arriving, to), arriving);
}

void ExpertDispatch::keep(PendingTransfer transfer, const at::Tensor& arriving) {
  if (!overlap_) transfer.wait();
  moves_.emplace_back(std::move(transfer), arriving);
}

at::Tensor ExpertDispatch::finish() {
  auto [transfer, arrived] = std::move(moves_.front());
  moves_.pop_front();
  transfer.wait();
  return arrived;
}

void ExpertDispatch::start_dispatch(const at::Tensor& tokens, const at::Tensor& weights) {
  const at::NoGradGuard no_grad;
  await_counts();
  // What a row says of its pairs: experts, then weights; one transfer for both.
  const at::Tensor pairs = at::cat({choices_, weights.contiguous().view(at::kInt)}, 1);
  if (group_->size() > 2) {
    const int64_t rows = total(sent_);
    start(gather_rows(tokens, map_, rows), false);
    start(pairs.index_select(0, map_.source_of_row.narrow(0, 0, rows)), false);
    return;
  }
  const int64_t count = tokens.size(0), bounds[] = {0, count, 2 * count};
  for (const at::Tensor& values : {tokens, pairs}) {
    const at::Tensor both = at::empty({2 * count, values.size(1)}, values.options());
    both.narrow(0, group_->rank() * count, count).copy_(values);
    const int64_t width = values.size(1), ends[] = {0, bounds[1] * width, bounds[2] * width};
    keep(group_->all_gather(both.view(-1), ends), both);
  }
}

DispatchedTokens ExpertDispatch::finish_dispatch() {
  DispatchedTokens out;
  out.rows = finish();
  const at::Tensor pairs = finish();
  const int64_t top_k = choices_.size(1);
  out.experts = pairs.narrow(1, 0, top_k).sub(group_->rank() * (experts_ / group_->size()));
  out.weights = pairs.narrow(1, top_k, top_k).contiguous().view(at::kFloat);
  out.expert_rows = expert_rows_;
  return out;
}

void ExpertDispatch::start_dispatch_backward(const at::Tensor& d_rows, const at::Tensor& d_weights) {
  start(d_rows, true);
  start(d_weights, true);
}

// A sent row has the gradients of its pairs, and zeros for the token's others.
std::pair<at::Tensor, at::Tensor> ExpertDispatch::finish_dispatch_backward(const at::Tensor& d_tokens) {
  const at::NoGradGuard no_grad;
  const at::Tensor d_rows = finish(), d_weights = finish();
  return {sum_rows(d_rows, map_, d_tokens), sum_rows(d_weights, map_, {})};
}

int64_t ExpertDispatch::rows_sent() const { return total(sent_) - sent_[static_cast<size_t>(group_->rank())]; }

}  // namespace marrow
