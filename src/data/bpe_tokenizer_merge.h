// The merging of byte-level BPE: one word's bytes to ids.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/tokenizer_json.h"

namespace marrow {

// The ids of recently seen short words; a table of fixed size, so memory is bounded: 2-way sets
// of 64-byte slots, each set keeping the word seen last.
class WordCache {
 public:
  static constexpr size_t kMaxBytes = 23, kMaxIds = 9;

  // A word of at most kMaxBytes bytes, padded with zeros, with its length in the last byte.
  struct Key {
    uint64_t words[3];
    explicit Key(std::string_view word);
    bool operator==(const Key& other) const {
      return words[0] == other.words[0] && words[1] == other.words[1] && words[2] == other.words[2];
    }
    size_t hash() const {
      uint64_t mixed = (words[0] ^ words[1] * 0x9e3779b97f4a7c15U) * 0xd6e8feb86659fd93U;
      mixed = (mixed ^ mixed >> 32 ^ words[2]) * 0xa0761d6478bd642fU;
      return static_cast<size_t>(mixed ^ mixed >> 29);
    }
  };

  WordCache();
  // The ids of the word, an empty span if it is not there.
  std::span<const int32_t> find(const Key& key);
  void insert(const Key& key, std::span<const int32_t> ids);  // 1 to kMaxIds ids

 private:
  struct alignas(64) Slot {
    Key key;
    uint32_t count;
    std::array<int32_t, kMaxIds> ids;
  };
  static constexpr size_t kSets = size_t{1} << 15;  // 4 MiB

  Slot* set_of(const Key& key) { return &slots_[(key.hash() & (kSets - 1)) * 2]; }
  std::vector<Slot> slots_;
};

class BpeMerger {
 public:
  // Buffers of one thread.
  struct Scratch {
    WordCache cache;
    std::vector<int32_t> ids;
    std::vector<uint32_t> ranks, next, previous;
    std::vector<uint64_t> heap;
  };

  // `path` names the file in errors about its vocab and merges.
  BpeMerger(const TokenizerSpec& spec, const std::string& path);

  // Appends the ids of `word`, which is not empty. O(n log n) in its length.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  struct Entry {
    uint32_t left, right, rank;
  };
  static constexpr uint32_t kNoRank = UINT32_MAX;
  static constexpr size_t kShort = 48;  // up to here a scan for the lowest rank beats a heap

  uint32_t rank_of(int32_t left, int32_t right) const;
  void add_merge(uint32_t left, uint32_t right, uint32_t rank);
  void merge_short(std::string_view word, std::vector<int32_t>& ids) const;
  void merge_long(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

  std::array<int32_t, 256> byte_ids_{};
  std::vector<Entry> table_;  // open addressing, a power of two; rank kNoRank: free
  size_t table_mask_ = 0;
  std::vector<int32_t> merged_;                           // by rank
  std::unordered_map<std::string, int32_t> whole_words_;  // with ignore_merges: bytes to id
};

}  // namespace marrow
