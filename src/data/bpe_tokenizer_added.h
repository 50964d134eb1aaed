// Finding added tokens in text.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/tokenizer_json.h"

namespace marrow {

// Finds the added tokens it was made with: leftmost, and of those the longest.
class AddedTokenFinder {
 public:
  // Special tokens are found like others, so that nothing is found inside of them, but unless
  // `special_tokens` they are then passed over as plain text.
  AddedTokenFinder(std::vector<AddedToken> tokens, bool special_tokens);

  // Calls plain(std::string_view) and token(id) for the parts of `text` in order.
  template <class Plain, class Token>
  void split(std::string_view text, Plain&& plain, Token&& token) const {
    size_t done = 0;
    Match match;
    for (size_t at = 0; find(text, at, match); at = match.end) {
      const auto [begin, end] = strip(text, match, done);
      if (match.token->special && !special_tokens_) continue;
      if (done < begin) plain(text.substr(done, begin - done));
      token(match.token->id);
      done = end;
    }
    if (done < text.size()) plain(text.substr(done));
  }

 private:
  struct Match {
    const AddedToken* token = nullptr;
    size_t begin = 0, end = 0;
  };
  bool find(std::string_view text, size_t from, Match& match) const;
  // The match's ends with the white space that its token takes along, not before `done`.
  static std::pair<size_t, size_t> strip(std::string_view text, const Match& match, size_t done);

  std::vector<AddedToken> tokens_;           // by their first two bytes, then longest first
  std::vector<uint32_t> buckets_;            // [65537] where the tokens of each two bytes start
  std::array<int32_t, 256> single_bytes_{};  // index of the token that is this one byte, or -1
  std::array<bool, 256> starts_{};           // does a token start with this byte?
  bool special_tokens_;
};

}  // namespace marrow
