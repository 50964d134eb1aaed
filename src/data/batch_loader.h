// Sequences for training, validation and evaluation out of tokenized corpora.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "data/indexed_corpus.h"
#include "data/sample_order.h"

namespace marrow {

struct SequenceBatch {
  int64_t sequences = 0, seq_len = 0;
  std::vector<int32_t> tokens;   // [sequences, seq_len]
  std::vector<int32_t> targets;  // [sequences, seq_len], the next token; −1: not trained
  // [sequences, seq_len], position in the sequence where the document of this token begins; 0 for the one that runs in
  // from before, and everywhere without mask_documents.
  std::vector<int32_t> document_start;
  bool mask_documents = false;
};

struct CorpusWeight {
  std::string path;  // prefix
  double weight = 1.0;
};

// The infinite global order of sequences: a pure function of (corpora, seed, index), by random access and without files
// of its own, so that it is the same on every rank, on every mesh and after every resume. A corpus is one stream of
// tokens; sample i is tokens [i·S, i·S + S], the last only a target; ⌊(tokens − 1) / S⌋ samples an epoch, each epoch in
// a new order, the tail dropped. With mask_documents the last token of a document has target −1, by the document
// boundaries of PREFIX.idx (an end-of-document token belongs to the document it ends).
class BatchLoader {
 public:
  struct Options {
    std::vector<CorpusWeight> sources;
    int64_t seq_len = 0;
    int64_t seed = 0;
    int64_t vocab_size = 0;  // the model's: every id is checked against it
    bool mask_documents = false;
    bool shuffle = true;  // false: each epoch in the corpus' own order
  };
  // Errors name the corpus: missing (kUsage), damaged, without tokens, too short for one sample, made with a larger
  // vocabulary than the model's, or with another tokenizer than its fellows (kBadInput).
  explicit BatchLoader(Options options);

  // Sequences [first, first + count) of the global order. Thread-safe.
  SequenceBatch load(int64_t first, int64_t count) const;
  // How many targets of these are trained, by the documents' bounds alone: no token is read. Thread-safe.
  int64_t count_targets(int64_t first, int64_t count) const;
  // Samples of one pass over every source: with one source, its number of windows.
  int64_t samples_per_epoch() const;
  int64_t samples_per_epoch(size_t source) const;
  // What the order and content of the data depend on, apart from seed and seq_len: per source its counts, tokenizer
  // hash, content hash and share. Paths do not enter.
  std::string fingerprint() const;
  const std::string& tokenizer_hash() const { return tokenizer_hash_; }  // "" where no PREFIX.json of a source tells it
  std::vector<std::string> warnings() const;

 private:
  struct Sample {
    const IndexedCorpus* corpus;
    int64_t first;  // its first token
  };
  Sample sample_at(int64_t index) const;
  // Calls mask(position) for each position in the sample, in order, whose target begins another document.
  template <typename Mask>
  void for_document_ends(const Sample& sample, const Mask& mask) const;
  void fill(const Sample& sample, int64_t sequence, SequenceBatch& batch) const;

  Options options_;
  Blend blend_;
  std::vector<IndexedCorpus> corpora_;  // [sources]
  std::string tokenizer_hash_;          // of them all
};

}  // namespace marrow
