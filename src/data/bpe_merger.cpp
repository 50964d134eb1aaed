#include "data/bpe_merger.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"

namespace marrow {

BpeMerger::BpeMerger(const TokenizerSpec& spec)
    : byte_ids_(spec.byte_ids),
      whole_words_(spec.words),
      table_(std::bit_ceil(spec.merges.size() * 2 + 16)) {
  // The last one of equal merges counts, as in the reference.
  for (uint32_t rank = 0; rank < spec.merges.size(); ++rank) {
    const auto [left, right, merged] = spec.merges[rank];
    table_[slot_of(left, right)] = {left, right, merged, rank};
  }
}

size_t BpeMerger::slot_of(int32_t left, int32_t right) const {
  const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  size_t at = pair * 0x9e3779b97f4a7c15U >> 20;
  for (;; ++at) {
    const Entry& entry = table_[at &= table_.size() - 1];
    if ((entry.left == left && entry.right == right) || entry.rank == kNoRank) return at;
  }
}

void BpeMerger::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
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

// Repeats: merge the leftmost of the pairs of lowest rank. The heap holds rank << 32 | position;
// entries whose pair has changed are skipped. O(n log n).
void BpeMerger::merge(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
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

}  // namespace marrow
