// Which sample comes when: a permutation per epoch and a blend of sources, both by random access.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace marrow {

// A pseudo-random permutation of [0, size) in O(1) memory, a function of (size, key) alone: a Feistel network over a
// grid of at least `size` cells; a value that falls outside walks on along its cycle (about one step more in √size).
class Permutation {
 public:
  Permutation(int64_t size, uint64_t key);  // size >= 1
  int64_t operator()(int64_t index) const;  // 0 <= index < size

 private:
  uint64_t size_, rows_, columns_, key_;
};

// The permutation's key for one pass over one source.
uint64_t permutation_key(int64_t seed, int64_t source, int64_t epoch);

// Interleaves sources by weight: after any n samples, source k was chosen within 1 of n · share(k) times. The schedule
// repeats after period() samples: the shortest period that gives the weights exactly, if that is at most 2^20, else
// 2^20 with shares rounded to multiples of 2^-20.
class Blend {
 public:
  // Weights > 0, in any unit. Error (kUsage) for others, and for a share below 2^-20.
  explicit Blend(const std::vector<double>& weights);

  struct Choice {
    int64_t source;
    int64_t sample;  // how many samples of this source came before
  };
  Choice at(int64_t index) const;  // O(1), index >= 0
  int64_t period() const { return period_; }
  // Samples of `source` in each period; share(k) = per_period(k) / period().
  int64_t per_period(int64_t source) const { return counts_[static_cast<size_t>(source)]; }

 private:
  int64_t period_ = 1;
  std::vector<int64_t> counts_;   // [sources]
  std::vector<Choice> schedule_;  // [period]: samples of that source earlier in the period
};

}  // namespace marrow
