// Text to token ids and back: the built-in `bytes` tokenizer and byte-level BPE (tokenizer.json).
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace marrow {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Appends the ids of `text`; thread-safe. BPE wants valid UTF-8: anything else is an Error that
  // names the byte offset (`bytes` takes any text). Appends no end-of-document id.
  virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;
  // The bytes of `ids`, which need not be whole characters. An id with no text (a model's padded
  // vocabulary has such) becomes U+FFFD; `bytes` gives its end of document no text.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  virtual int64_t vocab_size() const = 0;  // highest id + 1
  virtual std::optional<int32_t> end_of_document() const = 0;
  virtual const std::string& name() const = 0;  // "bytes" or the path of the tokenizer.json
  // Two tokenizers with one hash give the same ids: SHA-256 of the tokenizer.json (what sha256sum
  // prints); "bytes" has a fixed one.
  virtual const std::string& hash() const = 0;
};

struct TokenizerOptions {
  bool special_tokens = false;             // special tokens in text become their ids, else plain text
  std::optional<int32_t> end_of_document;  // in place of eos_token in tokenizer_config.json
};

// "bytes" (ids 0..255 and 256 for the end of a document), a tokenizer.json, or a folder holding
// one. A feature of the file that is not implemented is an Error naming its path in the file.
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name_or_path, const TokenizerOptions& options = {});

}  // namespace marrow
