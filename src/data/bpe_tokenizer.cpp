#include "data/bpe_tokenizer.h"

#include <algorithm>

#include "base/error.h"

namespace marrow {
namespace {

constexpr size_t kScratchBytesKept = size_t{16} << 20;
constexpr const char* kReplacementCharacter = "\xef\xbf\xbd";

}  // namespace

void AddedTokens::add(AddedToken token) {
  sizes_.insert(token.content.size());
  starts_[static_cast<uint8_t>(token.content[0])] = true;
  std::string content = token.content;
  tokens_.emplace(std::move(content), std::move(token));
}

const AddedToken* AddedTokens::find_longest(std::string_view text) const {
  for (const size_t size : sizes_) {
    if (size > text.size()) continue;
    if (const auto found = tokens_.find(text.substr(0, size)); found != tokens_.end()) {
      return &found->second;
    }
  }
  return nullptr;
}

BpeTokenizer::BpeTokenizer(TokenizerSpec spec, std::string path, std::string hash,
                           const TokenizerOptions& options)
    : path_(std::move(path)),
      hash_(std::move(hash)),
      special_tokens_(options.special_tokens),
      end_of_document_(options.end_of_document),
      nfc_(spec.nfc ? std::make_unique<const NfcNormalizer>() : nullptr),
      texts_(spec.texts),
      stages_(std::move(spec.stages)),
      merger_(spec) {
  for (AddedToken token : spec.added_tokens) {
    if (token.normalized && nfc_) {
      std::string normal;
      nfc_->append(token.content, normal);
      token.content = normal;
    }
    (token.normalized ? normalized_tokens_ : raw_tokens_).add(std::move(token));
  }
  if (!end_of_document_) end_of_document_ = read_end_of_document(spec, path_);
  MARROW_CHECK(!end_of_document_ || (*end_of_document_ >= 0 && *end_of_document_ < vocab_size()),
               ExitCode::kUsage, Fix("give --eod-id an id of this tokenizer"),
               "{}: end-of-document id {} is outside of the vocabulary of {} ids", path_,
               *end_of_document_, vocab_size());
}

std::unique_ptr<BpeTokenizer::Scratch> BpeTokenizer::borrow() const {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return std::make_unique<Scratch>();
  auto scratch = std::move(idle_.back());
  idle_.pop_back();
  return scratch;
}

// One that grew with a huge document is let go, so that memory does not stay taken.
void BpeTokenizer::give_back(std::unique_ptr<Scratch> scratch) const {
  const size_t grown = scratch->normal.capacity() + scratch->classes.capacity() +
                       scratch->merge.heap.capacity() * sizeof(uint64_t);
  const std::lock_guard lock(mutex_);
  if (grown <= kScratchBytesKept) idle_.push_back(std::move(scratch));
}

void BpeTokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
  const size_t valid = valid_utf8_length(text);
  MARROW_CHECK(valid == text.size(), ExitCode::kBadInput,
               Fix("repair the text, or tokenize with --on-error skip"),
               "text for {} is not valid UTF-8: byte {:#04x} at offset {} of {}", path_,
               static_cast<uint8_t>(text[valid]), valid, text.size());
  auto scratch = borrow();
  const auto push = [&](int32_t id) { ids.push_back(id); };
  const auto encode_normal = [&](std::string_view part) {
    encode_piece(0, part, class_text(part, scratch->classes), *scratch, ids);
  };
  const auto normalize = [&](std::string_view part) {
    if (nfc_) {
      scratch->normal.clear();
      nfc_->append(part, scratch->normal);
      part = scratch->normal;
    }
    normalized_tokens_.split(part, special_tokens_, encode_normal, push);
  };
  raw_tokens_.split(text, special_tokens_, normalize, push);
  give_back(std::move(scratch));
}

void BpeTokenizer::encode_piece(size_t stage, std::string_view text, std::string_view classes,
                                Scratch& scratch, std::vector<int32_t>& ids) const {
  if (stage == stages_.size()) return merger_.encode(text, scratch.merge, ids);
  const auto& [regex, keep_matches, keep_rest] = stages_[stage];
  const auto keep = [&](size_t begin, size_t end) {
    encode_piece(stage + 1, text.substr(begin, end - begin), classes.substr(begin, end - begin),
                 scratch, ids);
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

std::string BpeTokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) {
    text += id >= 0 && id < vocab_size() ? texts_[static_cast<size_t>(id)] : kReplacementCharacter;
  }
  return text;
}

}  // namespace marrow
