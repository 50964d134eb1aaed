// Byte-level BPE as a tokenizer.json describes it: added tokens, NFC, splitting, merging.
#pragma once
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "data/bpe_merger.h"
#include "data/tokenizer.h"
#include "data/unicode_text.h"

namespace marrow {

// Finds added tokens in text: leftmost, and of those the longest.
class AddedTokens {
 public:
  void add(AddedToken token);
  // Calls plain(std::string_view) and token(id) for the parts of `text` in order. Special tokens
  // are found like others, so that nothing is found inside of them, but unless `special_tokens`
  // they are then passed over as plain text.
  template <class Plain, class Token>
  void split(std::string_view text, bool special_tokens, Plain&& plain, Token&& token) const {
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const AddedToken* found = find(text.substr(at));
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
  // The token that `text` begins with.
  const AddedToken* find(std::string_view text) const {
    return starts_[static_cast<uint8_t>(text[0])] ? find_longest(text) : nullptr;
  }
  const AddedToken* find_longest(std::string_view text) const;

  std::map<std::string, AddedToken, std::less<>> tokens_;  // by content
  std::set<size_t, std::greater<>> sizes_;                 // of the contents
  std::array<bool, 256> starts_{};                         // does one start with this byte?
};

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(TokenizerSpec spec, std::string path, std::string hash,
               const TokenizerOptions& options);

  void encode(std::string_view text, std::vector<int32_t>& ids) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t vocab_size() const override { return static_cast<int64_t>(texts_.size()); }
  std::optional<int32_t> end_of_document() const override { return end_of_document_; }
  const std::string& name() const override { return path_; }
  const std::string& hash() const override { return hash_; }

 private:
  // What one encode call at a time needs; they are lent out, so that there are as many as there
  // are threads, and each thread's word cache stays warm.
  struct Scratch {
    RegexScratch regex;
    BpeMerger::Scratch merge;
    std::string normal, classes;
  };
  std::unique_ptr<Scratch> borrow() const;
  void give_back(std::unique_ptr<Scratch> scratch) const;

  // Applies the split stages from `stage` on to `text`, and merges the words that come out. The
  // expressions see `classes` in its place, a text of equal length.
  void encode_piece(size_t stage, std::string_view text, std::string_view classes, Scratch& scratch,
                    std::vector<int32_t>& ids) const;

  std::string path_, hash_;
  bool special_tokens_;
  std::optional<int32_t> end_of_document_;
  std::unique_ptr<const NfcNormalizer> nfc_;  // null without normalization
  AddedTokens raw_tokens_, normalized_tokens_;
  std::vector<std::string> texts_;  // [vocab_size]
  std::vector<SplitStage> stages_;
  BpeMerger merger_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

}  // namespace marrow
