// Strict reading of tokenizer.json: what is not implemented is an error that names its path in the
// file, so that a wrong token never comes out silently.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/pretokenizer.h"

namespace marrow {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool lstrip = false, rstrip = false;  // takes the white space before, behind it along
  bool normalized = false;              // is looked for in normalized text
  bool special = false;
};

// A byte-level BPE tokenizer as its file describes it.
struct TokenizerSpec {
  std::vector<std::pair<std::string, int32_t>> vocab;  // as in the file: bytes spelled as letters
  std::vector<std::pair<std::string, std::string>> merges;  // by rank, spelled like the vocab
  bool ignore_merges = false;  // a whole word of the vocab is taken without merging
  bool nfc = false;
  PreTokenizer pretokenizer;
  std::vector<AddedToken> added_tokens;
};

// Reads `text`, the content of the tokenizer.json at `path`.
TokenizerSpec read_tokenizer_json(std::string_view text, const std::string& path);

// The id of eos_token in the tokenizer_config.json beside `path`; nothing if there is none.
std::optional<int32_t> read_end_of_document(const TokenizerSpec& spec, const std::string& path);

// The bytes that a vocabulary entry spells (GPT-2's alphabet: a letter for each byte); nothing if
// it has a character outside of that alphabet.
std::optional<std::string> spelled_bytes(std::string_view entry);

}  // namespace marrow
