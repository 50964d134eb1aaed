#include "data/bpe_tokenizer.h"

#include <algorithm>

#include "base/error.h"

namespace marrow {
namespace {

constexpr size_t kScratchBytesKept = size_t{16} << 20;

std::vector<AddedToken> tokens_with(const TokenizerSpec& spec, bool normalized,
                                    const NfcNormalizer* nfc) {
  std::vector<AddedToken> tokens;
  for (const AddedToken& token : spec.added_tokens) {
    if (token.normalized != normalized) continue;
    tokens.push_back(token);
    if (!normalized || nfc == nullptr) continue;
    tokens.back().content.clear();
    nfc->append(token.content, tokens.back().content);
  }
  return tokens;
}

}  // namespace

BpeTokenizer::BpeTokenizer(TokenizerSpec spec, std::string path, std::string hash,
                           const TokenizerOptions& options)
    : path_(std::move(path)),
      hash_(std::move(hash)),
      end_of_document_(options.end_of_document),
      pretokenizer_(std::move(spec.pretokenizer)),
      merger_(spec, path_),
      nfc_(spec.nfc ? std::make_unique<const NfcNormalizer>() : nullptr),
      raw_tokens_(tokens_with(spec, false, nfc_.get()), options.special_tokens),
      normalized_tokens_(tokens_with(spec, true, nfc_.get()), options.special_tokens) {
  collect_texts(spec);
  if (!end_of_document_) end_of_document_ = read_end_of_document(spec, path_);
  MARROW_CHECK(!end_of_document_ || (*end_of_document_ >= 0 && *end_of_document_ < vocab_size()),
               ExitCode::kUsage, Fix("give --eod-id an id of this tokenizer"),
               "{}: end-of-document id {} is outside of the vocabulary of {} ids", path_,
               *end_of_document_, vocab_size());
}

void BpeTokenizer::collect_texts(const TokenizerSpec& spec) {
  int32_t highest = -1;
  for (const auto& [entry, id] : spec.vocab) highest = std::max(highest, id);
  for (const AddedToken& token : spec.added_tokens) highest = std::max(highest, token.id);
  // A corrupt id must not decide how much memory is taken.
  const size_t known = spec.vocab.size() + spec.added_tokens.size();
  MARROW_CHECK(static_cast<size_t>(highest) < known * 8 + 65536, ExitCode::kBadInput,
               Fix("repair the ids in this file"), "{}: model.vocab: id {} with only {} tokens",
               path_, highest, known);
  std::vector<std::string> texts(static_cast<size_t>(highest) + 1);
  has_text_.assign(texts.size(), false);
  for (const auto& [entry, id] : spec.vocab) {
    const auto index = static_cast<size_t>(id);
    MARROW_CHECK(!has_text_[index], ExitCode::kBadInput, Fix("give each entry an id of its own"),
                 "{}: model.vocab: id {} appears twice, the second time for {}", path_, id,
                 json_quote(entry));
    texts[index] = spelled_bytes(entry).value_or(entry);
    has_text_[index] = true;
  }
  for (const AddedToken& token : spec.added_tokens) {
    texts[static_cast<size_t>(token.id)] = token.content;
    has_text_[static_cast<size_t>(token.id)] = true;
  }
  token_ends_.reserve(texts.size());
  for (const std::string& text : texts) {
    token_texts_ += text;
    token_ends_.push_back(token_texts_.size());
  }
}

std::unique_ptr<BpeTokenizer::Scratch> BpeTokenizer::borrow() const {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto scratch = std::move(idle_.back());
      idle_.pop_back();
      return scratch;
    }
  }
  return std::make_unique<Scratch>();
}

// One that grew with a huge document is let go, so that memory does not stay taken.
void BpeTokenizer::give_back(std::unique_ptr<Scratch> scratch) const {
  if (scratch->normal.capacity() + scratch->words.classes.capacity() +
          scratch->merge.heap.capacity() * sizeof(uint64_t) >
      kScratchBytesKept) {
    return;
  }
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(scratch));
}

void BpeTokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
  bool ascii_only = true;
  const size_t invalid = find_invalid_utf8(text, ascii_only);
  MARROW_CHECK(invalid == text.size(), ExitCode::kBadInput,
               Fix("repair the text, or tokenize with --on-error skip"),
               "text for {} is not valid UTF-8: byte 0x{:02x} at offset {} of {}", path_,
               static_cast<uint8_t>(text[invalid]), invalid, text.size());
  auto scratch = borrow();
  const auto push = [&ids](int32_t id) { ids.push_back(id); };
  const auto encode_normalized = [&](std::string_view part) {
    encode_part(part, ascii_only, *scratch, ids);
  };
  const auto normalize = [&](std::string_view part) {
    if (nfc_ && !ascii_only) {
      scratch->normal.clear();
      nfc_->append(part, scratch->normal);
      part = scratch->normal;
    }
    normalized_tokens_.split(part, encode_normalized, push);
  };
  raw_tokens_.split(text, normalize, push);
  give_back(std::move(scratch));
}

void BpeTokenizer::encode_part(std::string_view text, bool ascii_only, Scratch& scratch,
                               std::vector<int32_t>& ids) const {
  pretokenizer_.for_each_word(text, ascii_only, scratch.words, [&](std::string_view word) {
    merger_.encode(word, scratch.merge, ids);
  });
}

std::string BpeTokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) {
    const auto index = static_cast<size_t>(id);
    if (id < 0 || index >= has_text_.size() || !has_text_[index]) {
      text += "\xef\xbf\xbd";
      continue;
    }
    const size_t begin = index == 0 ? 0 : token_ends_[index - 1];
    text.append(token_texts_, begin, token_ends_[index] - begin);
  }
  return text;
}

}  // namespace marrow
