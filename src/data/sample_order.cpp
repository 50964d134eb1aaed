#include "data/sample_order.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace marrow {
namespace {

constexpr int kRounds = 8;
constexpr int64_t kMaxPeriod = int64_t{1} << 20;

// Finalizer of SplitMix64: every input bit flips every output bit with probability 1/2.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// `hash` scaled to [0, bound).
uint64_t scale(uint64_t hash, uint64_t bound) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(hash) * bound >> 64);
}

}  // namespace

uint64_t permutation_key(int64_t seed, int64_t source, int64_t epoch) {
  uint64_t key = mix(static_cast<uint64_t>(seed) + 0x9E3779B97F4A7C15u);
  key = mix(key ^ (static_cast<uint64_t>(source) + 0xD1B54A32D192ED03u));
  return mix(key ^ (static_cast<uint64_t>(epoch) + 0x8CB92BA72F3D8DD7u));
}

Permutation::Permutation(int64_t size, uint64_t key) : size_(static_cast<uint64_t>(size)), key_(key) {
  rows_ = static_cast<uint64_t>(std::ceil(std::sqrt(static_cast<double>(size))));
  columns_ = (size_ + rows_ - 1) / rows_;
}

int64_t Permutation::operator()(int64_t index) const {
  auto value = static_cast<uint64_t>(index);
  do {
    uint64_t row = value / columns_, column = value % columns_;
    for (uint64_t round = 0; round < kRounds; round += 2) {
      row += scale(mix(mix(key_ + round) ^ column), rows_);
      if (row >= rows_) row -= rows_;
      column += scale(mix(mix(key_ + round + 1) ^ row), columns_);
      if (column >= columns_) column -= columns_;
    }
    value = row * columns_ + column;
  } while (value >= size_);
  return static_cast<int64_t>(value);
}

Blend::Blend(const std::vector<double>& weights) {
  MARROW_CHECK(!weights.empty(), ExitCode::kUsage, Fix("list at least one corpus prefix in data.train"),
               "no corpus is given");
  double sum = 0;
  for (const double weight : weights) {
    MARROW_CHECK(std::isfinite(weight) && weight > 0, ExitCode::kUsage,
                 Fix("give every entry of data.train a weight above 0, or leave it out"),
                 "a corpus has weight {}, expected a number above 0", weight);
    sum += weight;
  }
  std::vector<double> shares;
  for (const double weight : weights) {
    shares.push_back(weight / sum);
    MARROW_CHECK(shares.back() * kMaxPeriod >= 1, ExitCode::kUsage,
                 Fix("raise this weight in data.train, or leave the corpus out"),
                 "weight {} is a share of {} of all weights, below the smallest possible, 1/{}", weight, shares.back(),
                 kMaxPeriod);
  }
  const auto is_whole = [&](double share) {
    const double count = share * static_cast<double>(period_);
    return count > 0.5 && std::abs(count - std::round(count)) < 1e-9;
  };
  while (period_ < kMaxPeriod && !std::ranges::all_of(shares, is_whole)) ++period_;
  std::vector<std::pair<double, size_t>> remainders;
  for (size_t k = 0; k < shares.size(); ++k) {
    const double count = shares[k] * static_cast<double>(period_) + 1e-9;
    counts_.push_back(static_cast<int64_t>(count));
    remainders.emplace_back(-(count - std::floor(count)), k);
  }
  // Rounding down leaves fewer than one sample a source: they go to the largest remainders.
  std::ranges::sort(remainders);
  int64_t left = period_ - std::accumulate(counts_.begin(), counts_.end(), int64_t{0});
  for (size_t i = 0; left > 0; ++i, --left) ++counts_[remainders[i].second];

  // Sample j of a source with c samples in a period of D belongs into the slots from ⌊jD/c⌋ to before ⌈(j+1)D/c⌉: that
  // is what staying within 1 of its share means. The earliest deadline first meets all of them, for the fractional
  // schedule does and unit jobs on one processor need no more.
  std::vector<int64_t> drawn(counts_.size());
  for (int64_t slot = 0; slot < period_; ++slot) {
    size_t chosen = 0;
    int64_t earliest = INT64_MAX;
    for (size_t k = 0; k < counts_.size(); ++k) {
      const int64_t count = counts_[k];
      if (drawn[k] == count || drawn[k] * period_ / count > slot) continue;
      const int64_t deadline = ((drawn[k] + 1) * period_ + count - 1) / count;
      if (deadline < earliest) chosen = k, earliest = deadline;
    }
    schedule_.push_back({static_cast<int64_t>(chosen), drawn[chosen]++});
  }
}

Blend::Choice Blend::at(int64_t index) const {
  const auto [source, earlier] = schedule_[static_cast<size_t>(index % period_)];
  return {source, index / period_ * per_period(source) + earlier};
}

}  // namespace marrow
