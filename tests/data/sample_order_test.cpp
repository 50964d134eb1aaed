#include "data/sample_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"

namespace marrow {
namespace {

TEST(Permutation, IsOneForEverySize) {
  for (int64_t size = 1; size <= 300; ++size) {
    const Permutation permutation(size, permutation_key(1, 2, 3));
    std::set<int64_t> seen;
    for (int64_t i = 0; i < size; ++i) seen.insert(permutation(i));
    EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), size - 1);
  }
  const int64_t large = 1000003;
  std::vector<bool> seen(large);
  const Permutation permutation(large, 7);
  for (int64_t i = 0; i < large; ++i) seen[static_cast<size_t>(permutation(i))] = true;
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), large);
}

TEST(Permutation, HugeSizesStayInside) {
  for (const int64_t size : {(int64_t{1} << 31) + 11, (int64_t{1} << 52) + 1, int64_t{1} << 60}) {
    const Permutation permutation(size, 5);
    for (int64_t i = 0; i < 1000; ++i) {
      const int64_t value = permutation(size - 1 - i);
      EXPECT_GE(value, 0);
      EXPECT_LT(value, size);
    }
  }
}

// All orders of a small set are about equally frequent: 24 orders of 4 in 24,000 epochs, chi-square
// with 23 degrees of freedom (mean 23; 99.99% lie below 60).
TEST(Permutation, SmallOnesAreUniform) {
  std::map<std::vector<int64_t>, int> orders;
  constexpr int kEpochs = 24000;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    const Permutation permutation(4, permutation_key(11, 0, epoch));
    ++orders[{permutation(0), permutation(1), permutation(2), permutation(3)}];
  }
  EXPECT_EQ(orders.size(), 24u);
  double chi_square = 0;
  for (const auto& [order, count] : orders) chi_square += std::pow(count - 1000.0, 2) / 1000.0;
  EXPECT_LT(chi_square, 60);
}

// Neighbours end up far apart and positions do not follow indices, as in a random order.
TEST(Permutation, LargeOnesAreShuffled) {
  constexpr int64_t kSize = 100000;
  const Permutation permutation(kSize, permutation_key(3, 1, 4));
  double gap = 0, product = 0;
  for (int64_t i = 0; i + 1 < kSize; ++i) {
    const auto here = static_cast<double>(permutation(i));
    gap += std::abs(here - static_cast<double>(permutation(i + 1)));
    product += (here / kSize - 0.5) * (static_cast<double>(i) / kSize - 0.5);
  }
  EXPECT_NEAR(gap / kSize / kSize, 1.0 / 3, 0.01);
  EXPECT_NEAR(12 * product / kSize, 0, 0.02);  // correlation
}

TEST(Permutation, KeysDiffer) {
  std::set<uint64_t> keys;
  for (int64_t seed = 0; seed < 20; ++seed) {
    for (int64_t source = 0; source < 20; ++source) {
      for (int64_t epoch = 0; epoch < 20; ++epoch) keys.insert(permutation_key(seed, source, epoch));
    }
  }
  EXPECT_EQ(keys.size(), 8000u);
}

// Every source's count is within 1 of its share at every prefix, and `sample` counts up from 0.
void check_blend(const std::vector<double>& weights, int64_t samples) {
  const Blend blend(weights);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> counts(weights.size());
  for (int64_t i = 0; i < samples; ++i) {
    const auto [source, sample] = blend.at(i);
    ASSERT_EQ(sample, counts[static_cast<size_t>(source)]++);
    // Only the chosen one can run ahead, only a late one can lag: checked at its next turn.
    const double due = static_cast<double>(i + 1) * weights[static_cast<size_t>(source)] / sum;
    const double drift = static_cast<double>(i) * 0x1p-20;
    ASSERT_LT(static_cast<double>(sample + 1) - due, 1 + drift) << i;
    ASSERT_LT(due - static_cast<double>(sample + 1), 1 + drift) << i;
    if (i % 997 != 0 && i + 1 != samples) continue;
    for (size_t k = 0; k < weights.size(); ++k) {
      ASSERT_LT(std::abs(static_cast<double>(counts[k]) - static_cast<double>(i + 1) * weights[k] / sum), 1 + drift);
    }
  }
}

TEST(Blend, StaysWithinOneOfEveryShare) {
  check_blend({1}, 100);
  check_blend({0.999, 0.001}, 100000);
  check_blend({0.5, 0.3, 0.2}, 10000);
  check_blend({0.1, 0.7, 0.1, 0.1}, 10000);
  check_blend({1, 2, 3, 4, 5, 6, 7}, 10000);
  check_blend(std::vector<double>(300, 1.0 / 300), 10000);
  check_blend({0.5, 1e-5, 0.49999}, 300000);
  check_blend({std::sqrt(2), M_PI, std::exp(1), 0.01}, 1200000);  // no period: 2^20 and around
  std::vector<double> skewed{0.5};
  for (int i = 0; i < 150; ++i) skewed.push_back(1.0 / 300);
  check_blend(skewed, 10000);
}

int64_t count_of(const Blend& blend, int64_t source, int64_t samples) {
  int64_t count = 0;
  for (int64_t i = 0; i < samples; ++i) count += blend.at(i).source == source;
  return count;
}

TEST(Blend, ExactCounts) {
  const Blend two({0.999, 0.001});
  EXPECT_EQ(two.period(), 1000);
  EXPECT_EQ(count_of(two, 0, 10000), 9990);
  EXPECT_EQ(count_of(two, 1, 10000), 10);
  const Blend many(std::vector<double>(300, 1.0 / 300));
  for (int64_t k = 0; k < 300; ++k) EXPECT_EQ(count_of(many, k, 3000), 10);
  EXPECT_EQ(Blend({3, 1}).period(), 4);  // weights need not sum to 1
}

TEST(Blend, FarIndicesCostNothing) {
  const Blend blend({0.75, 0.25});
  const auto [source, sample] = blend.at(int64_t{4} << 50);
  EXPECT_EQ(sample, source == 0 ? int64_t{3} << 50 : int64_t{1} << 50);
}

TEST(Blend, ImpossibleWeightsAreRefused) {
  EXPECT_THROW(Blend({1.0, 0.0}), Error);
  EXPECT_THROW(Blend({1.0, -1.0}), Error);
  EXPECT_THROW(Blend({1.0, NAN}), Error);
  EXPECT_THROW(Blend({1.0, INFINITY}), Error);
  EXPECT_THROW(Blend({1.0, 1e-7}), Error);
}

}  // namespace
}  // namespace marrow
