// Byte-level BPE as a tokenizer.json describes it: added tokens, NFC, splitting, merging.
#pragma once
#include <memory>
#include <string>

#include "data/tokenizer.h"
#include "data/tokenizer_json.h"

namespace marrow {

// `path` and `hash` are the tokenizer's name() and hash().
std::unique_ptr<Tokenizer> make_bpe_tokenizer(TokenizerSpec spec, const std::string& path,
                                              const std::string& hash,
                                              const TokenizerOptions& options);

}  // namespace marrow
