// The merging of byte-level BPE.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "data/tokenizer_json.h"

namespace marrow {

// One word's bytes to ids.
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

  explicit BpeMerger(TokenizerSpec& spec)
      : byte_ids_(spec.byte_ids),
        whole_words_(std::move(spec.words)),
        table_(std::bit_ceil(spec.merges.size() * 2 + 16)) {
    // The last one of equal merges counts, as in the reference.
    for (uint32_t rank = 0; rank < spec.merges.size(); ++rank) {
      const auto [left, right, merged] = spec.merges[rank];
      table_[slot_of(left, right)] = {left, right, merged, rank};
    }
  }

  // Appends the ids of `word`, which is not empty.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
    std::array<uint64_t, 3> key{};
    if (word.size() >= sizeof key) return merge(word, scratch, ids);
    std::memcpy(key.data(), word.data(), word.size());
    key[2] |= uint64_t{word.size()} << 56;
    uint64_t hash = (key[0] ^ key[1] * 0x9e3779b97f4a7c15U) * 0xd6e8feb86659fd93U;
    hash = (hash ^ hash >> 32 ^ key[2]) * 0xa0761d6478bd642fU;
    CachedWord& known = scratch.cache[(hash ^ hash >> 29) & (scratch.cache.size() - 1)];
    if (known.key == key) {
      ids.insert(ids.end(), known.ids.begin(), known.ids.begin() + known.count);
      return;
    }
    const size_t before = ids.size();
    merge(word, scratch, ids);
    const size_t count = ids.size() - before;
    if (count > known.ids.size()) return;
    known.key = key;
    known.count = static_cast<uint32_t>(count);
    std::copy(ids.end() - static_cast<ptrdiff_t>(count), ids.end(), known.ids.begin());
  }

 private:
  struct Entry {
    int32_t left = 0, right = 0, merged = 0;
    uint32_t rank = kNoRank;  // kNoRank: free
  };
  static constexpr uint32_t kNoRank = UINT32_MAX;

  // Where the pair is in table_, or would be.
  size_t slot_of(int32_t left, int32_t right) const {
    const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
    size_t at = pair * 0x9e3779b97f4a7c15U >> 20;
    for (;; ++at) {
      const Entry& entry = table_[at &= table_.size() - 1];
      if ((entry.left == left && entry.right == right) || entry.rank == kNoRank) return at;
    }
  }

  // Repeats: merge the leftmost of the pairs of lowest rank. The heap holds rank << 32 | position; entries whose pair
  // has changed are skipped. O(n log n).
  void merge(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
    if (!whole_words_.empty()) {
      if (const auto whole = whole_words_.find(std::string(word)); whole != whole_words_.end()) {
        ids.push_back(whole->second);
        return;
      }
    }
    MARROW_CHECK(word.size() < INT32_MAX, ExitCode::kBadInput, Fix("split this document"),
                 "one word of {} bytes; at most {} are supported", word.size(), INT32_MAX - 1);
    const auto count = static_cast<uint32_t>(word.size());
    auto& [cache, parts, heap] = scratch;
    parts.resize(count);
    heap.clear();
    for (uint32_t i = 0; i < count; ++i) {
      parts[i] = {byte_ids_[static_cast<uint8_t>(word[i])], 0, kNoRank, i + 1, i - 1};
    }
    const auto rank = [&](uint32_t at) {
      Part& part = parts[at];
      part.rank = kNoRank;
      if (part.next == count) return false;
      const Entry& entry = table_[slot_of(part.id, parts[part.next].id)];
      part.rank = entry.rank;
      part.merged = entry.merged;
      if (part.rank == kNoRank) return false;
      heap.push_back(uint64_t{part.rank} << 32 | at);
      return true;
    };
    const std::greater<> lowest_first;
    for (uint32_t i = 0; i < count; ++i) rank(i);
    std::make_heap(heap.begin(), heap.end(), lowest_first);
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end(), lowest_first);
      const auto at = static_cast<uint32_t>(heap.back());
      Part& part = parts[at];
      const bool current = part.rank == heap.back() >> 32;
      heap.pop_back();
      if (!current) continue;
      Part& gone = parts[part.next];
      gone.rank = kNoRank;
      part.id = part.merged;
      part.next = gone.next;
      if (part.next < count) parts[part.next].previous = at;
      for (const uint32_t changed : {at > 0 ? part.previous : at, at}) {
        if (rank(changed)) std::push_heap(heap.begin(), heap.end(), lowest_first);
      }
    }
    for (uint32_t i = 0; i < count; i = parts[i].next) ids.push_back(parts[i].id);
  }

  std::array<int32_t, 256> byte_ids_;
  std::unordered_map<std::string, int32_t> whole_words_;
  std::vector<Entry> table_;  // open addressing, a power of two
};

}  // namespace marrow
