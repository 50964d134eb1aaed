// The merging of byte-level BPE: one word's bytes to ids.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/tokenizer_json.h"

namespace marrow {

class BpeMerger {
 private:
  // A short word and its ids.
  struct alignas(64) CachedWord {
    std::array<uint64_t, 3> key{};  // its bytes, zero-padded, and its length in the last byte
    uint32_t count = 0;
    std::array<int32_t, 9> ids{};
  };
  struct Part {
    int32_t id, merged;  // `merged` and `rank` are those of the pair that begins here
    uint32_t rank, next, previous;
  };

 public:
  // What one thread needs.
  struct Scratch {
    std::vector<CachedWord> cache = std::vector<CachedWord>(size_t{1} << 16);  // 4 MiB, by hash
    std::vector<Part> parts;
    std::vector<uint64_t> heap;
  };

  explicit BpeMerger(const TokenizerSpec& spec);

  // Appends the ids of `word`, which is not empty.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  struct Entry {
    int32_t left = 0, right = 0, merged = 0;
    uint32_t rank = kNoRank;  // kNoRank: free
  };
  static constexpr uint32_t kNoRank = UINT32_MAX;

  // Where the pair is in table_, or would be.
  size_t slot_of(int32_t left, int32_t right) const;
  void merge(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

  std::array<int32_t, 256> byte_ids_;
  std::unordered_map<std::string, int32_t> whole_words_;
  std::vector<Entry> table_;  // open addressing, a power of two
};

}  // namespace marrow
