#include "data/tokenizer.h"

#include <fmt/ranges.h>
#include <openssl/sha.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "data/tokenizer_json.h"
#include "data/unicode_text.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr int32_t kBytesEndOfDocument = 256;  // without a text

std::vector<std::string> byte_texts() {
  std::vector<std::string> texts(kBytesEndOfDocument + 1);
  for (size_t byte = 0; byte < kBytesEndOfDocument; ++byte) texts[byte] = static_cast<char>(byte);
  return texts;
}

class ByteTokenizer final : public Tokenizer {
 public:
  ByteTokenizer() : Tokenizer("bytes", "bytes", byte_texts(), kBytesEndOfDocument) {}
  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(text.data());
    ids.insert(ids.end(), bytes, bytes + text.size());
  }
};

// Finds added tokens in text: leftmost, and of those the longest.
class AddedTokens {
 public:
  void add(const AddedToken& token) {
    sizes_.insert(token.content.size());
    starts_[static_cast<uint8_t>(token.content[0])] = true;
    tokens_.emplace(token.content, token);
  }

  // Calls plain(std::string_view) and token(id) for the parts of `text` in order. Special tokens are found like others,
  // so that nothing is found inside of them, but unless `special_tokens` they are then passed over as plain text.
  template <class Plain, class Token>
  void split(std::string_view text, bool special_tokens, Plain&& plain, Token&& token) const {
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const AddedToken* found = starts_[static_cast<uint8_t>(text[at])] ? find(text.substr(at)) : nullptr;
      const size_t begin = at;
      at += found == nullptr ? 1 : found->content.size();
      if (found == nullptr || (found->special && !special_tokens)) continue;
      if (done < begin) plain(text.substr(done, begin - done));
      token(found->id);
      done = at;
    }
    if (done < text.size()) plain(text.substr(done));
  }

 private:
  // The longest token that `text` begins with.
  const AddedToken* find(std::string_view text) const {
    for (const size_t size : sizes_) {
      const auto found = size > text.size() ? tokens_.end() : tokens_.find(text.substr(0, size));
      if (found != tokens_.end()) return &found->second;
    }
    return nullptr;
  }

  std::map<std::string, AddedToken, std::less<>> tokens_;  // by content
  std::set<size_t, std::greater<>> sizes_;                 // of the contents
  std::array<bool, 256> starts_{};                         // does one start with this byte?
};

// A short word and its ids.
struct alignas(64) CachedWord {
  std::array<uint64_t, 3> key{};  // its bytes, zero-padded, and its length in the last byte
  uint32_t count = 0;
  std::array<int32_t, 9> ids{};
};

// A piece of a word that is being merged.
struct Part {
  int32_t id, merged;  // `merged` and `rank` are those of the pair that begins here
  uint32_t rank, next, previous;
};

// What one encode call at a time needs; lent out, so that there are as many as threads, and word caches stay warm.
struct Scratch {
  RegexScratch regex;
  std::string classes;
  std::vector<CachedWord> cache = std::vector<CachedWord>(size_t{1} << 16);  // 4 MiB, by hash
  std::vector<Part> parts;
  std::vector<uint64_t> heap;
};

// The merging of byte-level BPE: one word's bytes to ids.
class BpeMerger {
 public:
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
  static constexpr uint32_t kNoRank = UINT32_MAX;
  struct Entry {
    int32_t left = 0, right = 0, merged = 0;
    uint32_t rank = kNoRank;  // kNoRank: free
  };

  // Where the pair is in table_, or would be.
  size_t slot_of(int32_t left, int32_t right) const {
    const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
    size_t at = pair * 0x9e3779b97f4a7c15U >> 20;
    for (;; ++at) {
      const Entry& entry = table_[at &= table_.size() - 1];
      if ((entry.left == left && entry.right == right) || entry.rank == kNoRank) return at;
    }
  }

  // Repeats: merge the leftmost pair of lowest rank. The heap holds rank << 32 | position, also of pairs that changed.
  void merge(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
    if (!whole_words_.empty()) {
      const auto whole = whole_words_.find(std::string(word));
      if (whole != whole_words_.end()) return ids.push_back(whole->second);
    }
    MARROW_CHECK(word.size() < INT32_MAX, ExitCode::kBadInput, Fix("split this document"),
                 "one word of {} bytes; at most {} are supported", word.size(), INT32_MAX - 1);
    const auto count = static_cast<uint32_t>(word.size());
    auto& parts = scratch.parts;
    auto& heap = scratch.heap;
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

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(TokenizerSpec spec, const std::string& path, const std::string& hash, const TokenizerOptions& options)
      : Tokenizer(path, hash, std::move(spec.texts), options.end_of_document),
        special_tokens_(options.special_tokens),
        nfc_(spec.nfc),
        stages_(std::move(spec.stages)),
        merger_(spec) {
    for (AddedToken token : spec.added_tokens) {
      if (token.normalized && nfc_) token.content = to_nfc(token.content);
      (token.normalized ? normalized_tokens_ : raw_tokens_).add(token);
    }
    if (!end_of_document_) end_of_document_ = read_end_of_document(spec, path);
    MARROW_CHECK(!end_of_document_ || (*end_of_document_ >= 0 && *end_of_document_ < vocab_size()), ExitCode::kUsage,
                 Fix("give --eod-id an id of this tokenizer"),
                 "{}: end-of-document id {} is outside of the vocabulary of {} ids", path, *end_of_document_,
                 vocab_size());
  }

  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    const size_t valid = valid_utf8_length(text);
    MARROW_CHECK(valid == text.size(), ExitCode::kBadInput, Fix("repair the text, or tokenize with --on-error skip"),
                 "text for {} is not valid UTF-8: byte {:#04x} at offset {} of {}", name_,
                 static_cast<uint8_t>(text[valid]), valid, text.size());
    auto scratch = borrow();
    const auto push = [&](int32_t id) { ids.push_back(id); };
    const auto encode_normal = [&](std::string_view part) {
      encode_piece(0, part, class_text(part, scratch->classes), *scratch, ids);
    };
    const auto normalize = [&](std::string_view part) {
      const std::string normal = nfc_ ? to_nfc(part) : "";
      normalized_tokens_.split(nfc_ ? normal : part, special_tokens_, encode_normal, push);
    };
    raw_tokens_.split(text, special_tokens_, normalize, push);
    // One that grew with a huge document is let go, so that memory does not stay taken.
    const size_t grown = scratch->classes.capacity() + scratch->heap.capacity() * 8;
    const std::lock_guard lock(mutex_);
    if (grown <= size_t{16} << 20) idle_.push_back(std::move(scratch));
  }

 private:
  std::unique_ptr<Scratch> borrow() const {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<Scratch>();
    auto scratch = std::move(idle_.back());
    idle_.pop_back();
    return scratch;
  }

  // Applies the split stages from `stage` on to `text`, and merges the words that come out. The expressions see
  // `classes` in its place, a text of equal length.
  void encode_piece(size_t stage, std::string_view text, std::string_view classes, Scratch& scratch,
                    std::vector<int32_t>& ids) const {
    if (stage == stages_.size()) return merger_.encode(text, scratch, ids);
    const auto& [regex, keep_matches, keep_rest] = stages_[stage];
    const auto keep = [&](size_t begin, size_t end) {
      encode_piece(stage + 1, text.substr(begin, end - begin), classes.substr(begin, end - begin), scratch, ids);
    };
    size_t at = 0;
    while (at < text.size() && regex.find(classes, at, scratch.regex)) {
      const size_t begin = scratch.regex.begin(), end = scratch.regex.end();
      if (keep_rest && at < begin) keep(at, begin);
      if (keep_matches) keep(begin, end);
      at = end;
    }
    if (keep_rest && at < text.size()) keep(at, text.size());
  }

  bool special_tokens_, nfc_;
  AddedTokens raw_tokens_, normalized_tokens_;
  std::vector<SplitStage> stages_;
  BpeMerger merger_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

std::string hash_of_file(const std::string& text) {
  return text == bytes_tokenizer_files()[0].text ? "bytes" : sha256_hex(text);
}

}  // namespace

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) {
    text += id >= 0 && id < vocab_size() ? texts_[static_cast<size_t>(id)] : kReplacementCharacter;
  }
  return text;
}

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name_or_path, const TokenizerOptions& options) {
  const bool is_bytes = name_or_path == "bytes";
  const std::string path = fs::is_directory(name_or_path) ? name_or_path + "/tokenizer.json" : name_or_path;
  MARROW_CHECK(
      is_bytes || fs::exists(path), ExitCode::kUsage,
      Fix("give \"bytes\", a tokenizer.json or a folder that holds one, as AutoTokenizer.save_pretrained writes it"),
      "tokenizer {}: there is no file {}", json_quote(name_or_path), path);
  const std::string text = is_bytes ? bytes_tokenizer_files()[0].text : read_text_file(path);
  const std::string hash = hash_of_file(text);
  if (hash != "bytes") return std::make_unique<BpeTokenizer>(read_tokenizer_json(text, path), path, hash, options);
  MARROW_CHECK(options.end_of_document.value_or(kBytesEndOfDocument) == kBytesEndOfDocument, ExitCode::kUsage,
               Fix("leave out --eod-id"), "end-of-document id {} with the tokenizer bytes, which has {}",
               *options.end_of_document, kBytesEndOfDocument);
  return std::make_unique<ByteTokenizer>();
}

std::string tokenizer_hash(const std::string& folder) {
  const std::string path = folder + "/tokenizer.json";
  return fs::exists(path) ? hash_of_file(read_text_file(path)) : "";
}

std::string sha256_hex(std::string_view data) {
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const uint8_t*>(data.data()), data.size(), digest.data());
  return fmt::format("{:02x}", fmt::join(digest, ""));
}

}  // namespace marrow
