// Strict reading of tokenizer.json: what marrow lacks is an error with its path, so that no token is wrong.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/regex.h"

namespace marrow {

constexpr const char* kReplacementCharacter = "\xef\xbf\xbd";  // the text of an id that has none

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool normalized = false;  // is looked for in normalized text
  bool special = false;
};

// Cuts a piece of text at the matches of an expression.
struct SplitStage {
  Regex regex;
  bool keep_matches = true, keep_rest = true;
};

struct BpeMerge {
  int32_t left, right, merged;  // ids
};

// A byte-level BPE tokenizer as its file describes it.
struct TokenizerSpec {
  std::unordered_map<std::string, int32_t> vocab;  // as in the file, and added tokens
  std::array<int32_t, 256> byte_ids{};
  std::vector<std::string> texts;                  // of all ids; U+FFFD in a gap of them
  std::unordered_map<std::string, int32_t> words;  // to take whole, without merging; by their bytes
  std::vector<BpeMerge> merges;                    // by rank
  bool nfc = false;
  std::vector<SplitStage> stages;  // each applied to the pieces that the one before it left
  std::vector<AddedToken> added_tokens;
};

// Reads `text`, the content of the tokenizer.json at `path`.
TokenizerSpec read_tokenizer_json(std::string_view text, const std::string& path);

// The id of eos_token in the tokenizer_config.json beside `path`; nothing if there is none.
std::optional<int32_t> read_end_of_document(const TokenizerSpec& spec, const std::string& path);

// A Split's expression, written for Oniguruma. std::invalid_argument names what PCRE2 may read differently.
Regex split_regex(const std::string& pattern);

}  // namespace marrow
