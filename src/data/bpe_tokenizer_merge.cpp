#include "data/bpe_tokenizer_merge.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace marrow {
namespace {

uint64_t load(const char* from, size_t count) {
  uint64_t value = 0;
  std::memcpy(&value, from, count);
  return value;
}

// `count` < 8 bytes from `from`, zero-padded. `from` need not have 8 bytes behind it.
uint64_t load_tail(const char* from, size_t count) {
  if (count >= 4) return load(from, 4) | load(from + count - 4, 4) << (8 * (count - 4));
  if (count == 0) return 0;
  const auto byte = [from](size_t i) { return uint64_t{static_cast<uint8_t>(from[i])}; };
  return byte(0) | byte(count / 2) << (8 * (count / 2)) | byte(count - 1) << (8 * (count - 1));
}

size_t hash_pair(uint32_t left, uint32_t right) {
  const uint64_t mixed = (uint64_t{left} << 32 | right) * 0x9e3779b97f4a7c15U;
  return static_cast<size_t>(mixed >> 20);
}

}  // namespace

WordCache::Key::Key(std::string_view word) {
  const char* text = word.data();
  const size_t size = word.size();
  const uint64_t length = uint64_t{size} << 56;
  if (size < 8) {
    words[0] = load_tail(text, size);
    words[1] = 0;
    words[2] = length;
  } else if (size < 16) {
    words[0] = load(text, 8);
    words[1] = load_tail(text + 8, size - 8);
    words[2] = length;
  } else {
    words[0] = load(text, 8);
    words[1] = load(text + 8, 8);
    words[2] = load_tail(text + 16, size - 16) | length;
  }
}

WordCache::WordCache() : slots_(kSets * 2, Slot{Key(""), 0, {}}) {}

std::span<const int32_t> WordCache::find(const Key& key) {
  Slot* set = set_of(key);
  if (set[0].key == key) return {set[0].ids.data(), set[0].count};
  if (set[1].key == key) return {set[1].ids.data(), set[1].count};
  return {};
}

void WordCache::insert(const Key& key, std::span<const int32_t> ids) {
  Slot* set = set_of(key);
  set[1] = set[0];
  set[0].key = key;
  set[0].count = static_cast<uint32_t>(ids.size());
  std::copy(ids.begin(), ids.end(), set[0].ids.begin());
}

BpeMerger::BpeMerger(const TokenizerSpec& spec, const std::string& path) {
  std::unordered_map<std::string_view, int32_t> ids;
  ids.reserve(spec.vocab.size());
  byte_ids_.fill(-1);
  for (const auto& [entry, id] : spec.vocab) {
    ids.emplace(entry, id);
    const auto bytes = spelled_bytes(entry);
    if (!bytes || bytes->empty()) continue;
    if (bytes->size() == 1) byte_ids_[static_cast<uint8_t>((*bytes)[0])] = id;
    if (spec.ignore_merges) whole_words_.emplace(*bytes, id);
  }
  for (size_t byte = 0; byte < byte_ids_.size(); ++byte) {
    MARROW_CHECK(byte_ids_[byte] >= 0, ExitCode::kBadInput,
                 Fix("use a byte-level tokenizer, whose vocab has an entry for each of the 256 "
                     "bytes"),
                 "{}: model.vocab: byte 0x{:02x} has no entry", path, byte);
  }

  table_.assign(std::bit_ceil(spec.merges.size() * 2 + 16), Entry{0, 0, kNoRank});
  table_mask_ = table_.size() - 1;
  merged_.reserve(spec.merges.size());
  for (size_t rank = 0; rank < spec.merges.size(); ++rank) {
    const auto& [left, right] = spec.merges[rank];
    const std::string whole = left + right;
    const auto id = [&](const std::string& entry) {
      const auto found = ids.find(entry);
      MARROW_CHECK(
          found != ids.end(), ExitCode::kBadInput,
          Fix("repair the file: both parts of a merge and its result must be in the vocab"),
          "{}: model.merges[{}]: {} is not in model.vocab", path, rank, json_quote(entry));
      return found->second;
    };
    add_merge(static_cast<uint32_t>(id(left)), static_cast<uint32_t>(id(right)),
              static_cast<uint32_t>(rank));
    merged_.push_back(id(whole));
  }
}

// The last one of equal merges counts, as in the reference.
void BpeMerger::add_merge(uint32_t left, uint32_t right, uint32_t rank) {
  size_t at = hash_pair(left, right) & table_mask_;
  while (table_[at].rank != kNoRank && (table_[at].left != left || table_[at].right != right)) {
    at = (at + 1) & table_mask_;
  }
  table_[at] = {left, right, rank};
}

uint32_t BpeMerger::rank_of(int32_t left, int32_t right) const {
  const auto first = static_cast<uint32_t>(left), second = static_cast<uint32_t>(right);
  size_t at = hash_pair(first, second) & table_mask_;
  while (true) {
    const Entry& entry = table_[at];
    if ((entry.left == first && entry.right == second) || entry.rank == kNoRank) return entry.rank;
    at = (at + 1) & table_mask_;
  }
}

void BpeMerger::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  if (word.size() > WordCache::kMaxBytes) {
    const auto whole =
        whole_words_.empty() ? whole_words_.end() : whole_words_.find(std::string(word));
    if (whole != whole_words_.end()) {
      ids.push_back(whole->second);
    } else if (word.size() <= kShort) {
      merge_short(word, ids);
    } else {
      merge_long(word, scratch, ids);
    }
    return;
  }
  const WordCache::Key key(word);
  const auto known = scratch.cache.find(key);
  if (!known.empty()) {
    ids.insert(ids.end(), known.begin(), known.end());
    return;
  }
  const size_t before = ids.size();
  const auto whole =
      whole_words_.empty() ? whole_words_.end() : whole_words_.find(std::string(word));
  if (whole != whole_words_.end()) {
    ids.push_back(whole->second);
  } else {
    merge_short(word, ids);
  }
  const auto fresh = std::span<const int32_t>(ids).subspan(before);
  if (fresh.size() <= WordCache::kMaxIds) scratch.cache.insert(key, fresh);
}

// Repeats: merge the leftmost of the pairs of lowest rank.
void BpeMerger::merge_short(std::string_view word, std::vector<int32_t>& ids) const {
  std::array<int32_t, kShort> parts;
  std::array<uint32_t, kShort> ranks;  // of the pair that starts at a part
  size_t count = word.size();
  for (size_t i = 0; i < count; ++i) parts[i] = byte_ids_[static_cast<uint8_t>(word[i])];
  for (size_t i = 0; i + 1 < count; ++i) ranks[i] = rank_of(parts[i], parts[i + 1]);
  while (count > 1) {
    const auto* lowest = std::min_element(ranks.data(), ranks.data() + count - 1);
    if (*lowest == kNoRank) break;
    const auto at = static_cast<size_t>(lowest - ranks.data());
    parts[at] = merged_[*lowest];
    std::copy(parts.data() + at + 2, parts.data() + count, parts.data() + at + 1);
    std::copy(ranks.data() + at + 1, ranks.data() + count - 1, ranks.data() + at);
    --count;
    if (at > 0) ranks[at - 1] = rank_of(parts[at - 1], parts[at]);
    if (at + 1 < count) ranks[at] = rank_of(parts[at], parts[at + 1]);
  }
  ids.insert(ids.end(), parts.data(), parts.data() + count);
}

// The same with a heap of rank << 32 | position; entries whose pair has changed are skipped.
void BpeMerger::merge_long(std::string_view word, Scratch& scratch,
                           std::vector<int32_t>& ids) const {
  MARROW_CHECK(word.size() < INT32_MAX, ExitCode::kBadInput, Fix("split this document"),
               "one word of {} bytes; at most {} are supported", word.size(), INT32_MAX - 1);
  const auto count = static_cast<uint32_t>(word.size());
  auto& [cache, parts, ranks, next, previous, heap] = scratch;
  parts.resize(count);
  ranks.assign(count, kNoRank);
  next.resize(count);
  previous.resize(count);
  heap.clear();
  for (uint32_t i = 0; i < count; ++i) {
    parts[i] = byte_ids_[static_cast<uint8_t>(word[i])];
    next[i] = i + 1;
    previous[i] = i - 1;  // of the first: never read
  }
  const auto entry = [&](uint32_t at) { return uint64_t{ranks[at]} << 32 | at; };
  for (uint32_t i = 0; i + 1 < count; ++i) {
    ranks[i] = rank_of(parts[i], parts[i + 1]);
    if (ranks[i] != kNoRank) heap.push_back(entry(i));
  }
  const std::greater<> lowest_first;
  std::make_heap(heap.begin(), heap.end(), lowest_first);
  const auto rank_again = [&](uint32_t at) {
    ranks[at] = next[at] < count ? rank_of(parts[at], parts[next[at]]) : kNoRank;
    if (ranks[at] == kNoRank) return;
    heap.push_back(entry(at));
    std::push_heap(heap.begin(), heap.end(), lowest_first);
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), lowest_first);
    const auto rank = static_cast<uint32_t>(heap.back() >> 32);
    const auto at = static_cast<uint32_t>(heap.back());
    heap.pop_back();
    if (ranks[at] != rank) continue;
    const uint32_t gone = next[at];
    parts[at] = merged_[rank];
    ranks[gone] = kNoRank;
    next[at] = next[gone];
    if (next[at] < count) previous[next[at]] = at;
    if (at > 0) rank_again(previous[at]);
    rank_again(at);
  }
  for (uint32_t i = 0; i < count; i = next[i]) ids.push_back(parts[i]);
}

}  // namespace marrow
