// Byte-level BPE as a tokenizer.json describes it: added tokens, NFC, splitting, merging.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "data/bpe_tokenizer_added.h"
#include "data/bpe_tokenizer_merge.h"
#include "data/tokenizer.h"
#include "data/unicode_text.h"

namespace marrow {

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(TokenizerSpec spec, std::string path, std::string hash,
               const TokenizerOptions& options);

  void encode(std::string_view text, std::vector<int32_t>& ids) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t vocab_size() const override { return static_cast<int64_t>(token_ends_.size()); }
  std::optional<int32_t> end_of_document() const override { return end_of_document_; }
  const std::string& name() const override { return path_; }
  const std::string& hash() const override { return hash_; }

 private:
  // What one encode call at a time needs; they are lent out, so that there are as many as there
  // are threads, and each thread's word cache stays warm.
  struct Scratch {
    PreTokenizer::Scratch words;
    BpeMerger::Scratch merge;
    std::string normal;
  };
  std::unique_ptr<Scratch> borrow() const;
  void give_back(std::unique_ptr<Scratch> scratch) const;

  void encode_part(std::string_view text, bool ascii_only, Scratch& scratch,
                   std::vector<int32_t>& ids) const;
  void collect_texts(const TokenizerSpec& spec);

  std::string path_, hash_;
  std::optional<int32_t> end_of_document_;
  PreTokenizer pretokenizer_;
  BpeMerger merger_;
  std::unique_ptr<const NfcNormalizer> nfc_;  // null without normalization
  AddedTokenFinder raw_tokens_, normalized_tokens_;
  std::string token_texts_;         // of all ids, end to end
  std::vector<size_t> token_ends_;  // [vocab_size] in token_texts_
  std::vector<bool> has_text_;      // [vocab_size] false in a gap of the ids
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

}  // namespace marrow
