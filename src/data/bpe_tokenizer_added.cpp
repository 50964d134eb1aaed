#include "data/bpe_tokenizer_added.h"

#include <algorithm>

#include "data/unicode_text.h"

namespace marrow {
namespace {

size_t first_two(std::string_view text) {
  return static_cast<size_t>(static_cast<uint8_t>(text[0])) << 8 | static_cast<uint8_t>(text[1]);
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens, bool special_tokens)
    : tokens_(std::move(tokens)), special_tokens_(special_tokens) {
  const auto comes_out = [&](const AddedToken& token) { return special_tokens || !token.special; };
  if (std::none_of(tokens_.begin(), tokens_.end(), comes_out)) tokens_.clear();
  std::sort(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) {
    const auto key = [](const AddedToken& token) {
      return token.content.size() < 2 ? size_t{0} : first_two(token.content);
    };
    return key(a) != key(b) ? key(a) < key(b) : a.content.size() > b.content.size();
  });
  buckets_.assign(65537, 0);
  single_bytes_.fill(-1);
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& content = tokens_[i].content;
    starts_[static_cast<uint8_t>(content[0])] = true;
    if (content.size() == 1) {
      single_bytes_[static_cast<uint8_t>(content[0])] = static_cast<int32_t>(i);
    }
    ++buckets_[(content.size() < 2 ? 0 : first_two(content)) + 1];
  }
  for (size_t i = 1; i < buckets_.size(); ++i) buckets_[i] += buckets_[i - 1];
}

bool AddedTokenFinder::find(std::string_view text, size_t from, Match& match) const {
  if (tokens_.empty()) return false;
  for (size_t at = from; at < text.size(); ++at) {
    if (!starts_[static_cast<uint8_t>(text[at])]) continue;
    const std::string_view rest = text.substr(at);
    const AddedToken* found = nullptr;
    if (rest.size() > 1) {
      const size_t key = first_two(rest);
      for (uint32_t i = buckets_[key]; i < buckets_[key + 1] && found == nullptr; ++i) {
        if (tokens_[i].content.size() > 1 && rest.starts_with(tokens_[i].content)) {
          found = &tokens_[i];
        }
      }
    }
    const int32_t single = single_bytes_[static_cast<uint8_t>(text[at])];
    if (found == nullptr && single >= 0) found = &tokens_[static_cast<size_t>(single)];
    if (found == nullptr) continue;
    match = {found, at, at + found->content.size()};
    return true;
  }
  return false;
}

std::pair<size_t, size_t> AddedTokenFinder::strip(std::string_view text, const Match& match,
                                                  size_t done) {
  size_t begin = match.begin, end = match.end;
  if (match.token->lstrip) {
    begin = std::max(begin - trailing_space(text.substr(0, begin)), done);
  }
  if (match.token->rstrip) end += leading_space(text.substr(end));
  return {begin, end};
}

}  // namespace marrow
