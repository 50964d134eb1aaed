// A tokenized corpus on disk: Megatron's indexed dataset, PREFIX.bin and PREFIX.idx; PREFIX.json tells the tokenizer.
//
// PREFIX.idx, little-endian: "MMIDIDX\0\0", u64 version 1, u8 dtype code, u64 sequences, u64 document indices
// (documents + 1), int32 length of each sequence, int64 byte offset of each in PREFIX.bin, int64 first sequence of each
// document, then the sequence count. marrow writes one sequence a document. PREFIX.bin: the tokens, without gaps.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/files.h"

namespace marrow {

// What PREFIX.json says beyond the counts.
struct CorpusInfo {
  std::string tokenizer;       // name or path, for people
  std::string tokenizer_hash;  // of its content
  int64_t vocab_size = 0;
  std::optional<int32_t> end_of_document;  // none: documents end without such a token
  std::optional<uint32_t> checksum = {};   // CRC-32 of PREFIX.bin
};

// Megatron's dtype code for ids below `vocab_size`: 8 (uint16) up to 65,536 ids, else 4 (int32).
uint8_t corpus_dtype_code(int64_t vocab_size);

// Writes a corpus under temporary names (temporary_path) that become PREFIX.* in finish(); before that,
// nothing under the final names changes. Memory does not grow with the corpus.
class CorpusWriter {
 public:
  // Creates the output's folder. Error (kUsage): existing output without `overwrite`, another run of the same prefix.
  CorpusWriter(std::string prefix, CorpusInfo info, bool overwrite);
  ~CorpusWriter();  // removes the temporary files
  CorpusWriter(const CorpusWriter&) = delete;
  CorpusWriter& operator=(const CorpusWriter&) = delete;

  // Adds documents: their tokens one after the other, and the token count of each.
  void append(std::span<const int32_t> ids, std::span<const int32_t> lengths);
  // Completes the index, flushes all to disk, renames. PREFIX.idx comes last: a corpus without it is none.
  void finish();

  int64_t documents() const { return documents_; }
  int64_t tokens() const { return tokens_; }

 private:
  void write_index_tail();

  std::string prefix_;
  CorpusInfo info_;
  int64_t width_;  // bytes a token
  int64_t documents_ = 0, tokens_ = 0;
  std::optional<FileLock> lock_;  // marks PREFIX as being written
  std::optional<OutputFile> bin_, idx_;
  uint32_t checksum_ = 0;
};

// A corpus as one stream of tokens, its documents one after the other. Memory-mapped; reading is thread-safe. The
// constructor checks every count, length, offset and document index against the file sizes (Error kBadInput naming the
// file and both values; kUsage where a file is missing).
class IndexedCorpus {
 public:
  explicit IndexedCorpus(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  int64_t tokens() const { return tokens_; }
  int64_t documents() const { return documents_; }
  int64_t sequences() const { return sequences_; }
  uint8_t dtype_code() const { return dtype_code_; }
  // Empty where there is no PREFIX.json; then warning() says so.
  const std::optional<CorpusInfo>& info() const { return info_; }
  const std::string& warning() const { return warning_; }

  // All that read give an Error (kBadInput) where a file was truncated before the call.
  // Copies tokens [first, first + out.size()). Error (kBadInput) at the first id outside [0, vocab_size).
  void read(int64_t first, std::span<int32_t> out, int64_t vocab_size) const;
  // Position of the first token of document `document`; tokens() for documents().
  int64_t document_begin(int64_t document) const;
  // The first document, from `document` 0 on, that begins after position `token`; documents() if none.
  int64_t document_after(int64_t token) const;
  // Identifies the content, not paths or times: every size and length, the checksum in PREFIX.json, and PREFIX.bin:
  // all of it up to 256 MiB (Error kBadInput where its checksum is another), else that much spread over it.
  std::string content_hash() const;

 private:
  int64_t document_begin(std::span<const std::byte> index, int64_t document) const;
  void check_header();
  void check_sequences();
  void check_documents() const;
  void read_info();

  std::string prefix_;
  MappedFile idx_, bin_;
  uint8_t dtype_code_ = 0;
  int64_t width_ = 0, tokens_ = 0, sequences_ = 0, documents_ = 0;
  std::optional<CorpusInfo> info_;
  std::string warning_;
};

}  // namespace marrow
