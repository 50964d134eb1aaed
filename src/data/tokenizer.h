// Text to token ids and back: the built-in `bytes` tokenizer and byte-level BPE (tokenizer.json).
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"

namespace marrow {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Appends the ids of `text`; thread-safe. BPE wants valid UTF-8: anything else is an Error that names the byte offset
  // (`bytes` takes any text). Appends no end-of-document id.
  virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;
  // The bytes of `ids`, which need not be whole characters. An id with no text (a model's padded vocabulary has such)
  // becomes U+FFFD; `bytes` gives its end of document no text.
  std::string decode(std::span<const int32_t> ids) const;
  int64_t vocab_size() const { return std::ssize(texts_); }  // highest id + 1
  std::optional<int32_t> end_of_document() const { return end_of_document_; }
  const std::string& name() const { return name_; }  // "bytes" or the path of the tokenizer.json
  // Two tokenizers with one hash give the same ids: SHA-256 of the tokenizer.json (what sha256sum prints), or "bytes".
  const std::string& hash() const { return hash_; }

 protected:
  Tokenizer(std::string name, std::string hash, std::vector<std::string> texts, std::optional<int32_t> end_of_document)
      : name_(std::move(name)), hash_(std::move(hash)), texts_(std::move(texts)), end_of_document_(end_of_document) {}
  std::string name_, hash_;
  std::vector<std::string> texts_;  // of all ids
  std::optional<int32_t> end_of_document_;
};

struct TokenizerOptions {
  bool special_tokens = false;             // special tokens in text become their ids, else plain text
  std::optional<int32_t> end_of_document;  // in place of eos_token in tokenizer_config.json
};

// "bytes" (ids 0..255 and 256 for the end of a document), a tokenizer.json, or a folder holding one; the files of
// `bytes` itself give "bytes". A feature of the file that marrow lacks is an Error naming its path in the file.
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name_or_path, const TokenizerOptions& options = {});

// The hash of the tokenizer.json in `folder`, whether or not it can be read in full; "" if there is none.
std::string tokenizer_hash(const std::string& folder);
std::string sha256_hex(std::string_view data);

// tokenizer.json and tokenizer_config.json for transformers of our `bytes` tokenizer: byte b is b, <|endoftext|> 256.
std::vector<SideFile> bytes_tokenizer_files();

}  // namespace marrow
