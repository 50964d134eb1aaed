#include "data/batch_loader.h"

#include <algorithm>

namespace marrow {

BatchLoader::BatchLoader(Options options)
    : options_(std::move(options)), blend_([&] {
        std::vector<double> weights;
        for (const CorpusWeight& source : options_.sources) weights.push_back(source.weight);
        return weights;
      }()) {
  MARROW_CHECK(options_.seq_len >= 1, ExitCode::kUsage, Fix("set data.seq_len to 1 or more"),
               "seq_len is {}, expected at least 1", options_.seq_len);
  for (const CorpusWeight& source : options_.sources) corpora_.emplace_back(source.path);
  const IndexedCorpus* known = nullptr;  // the first whose tokenizer is known
  for (const IndexedCorpus& corpus : corpora_) {
    MARROW_CHECK(corpus.tokens() > options_.seq_len, ExitCode::kBadInput,
                 Fix("lower data.seq_len (eval: --seq-len), tokenize more text into it, or leave it out of the config"),
                 "corpus {} has {} documents and {} tokens, too few for one sample of seq_len {} and its last target: "
                 "{} are needed",
                 corpus.prefix(), corpus.documents(), corpus.tokens(), options_.seq_len, options_.seq_len + 1);
    if (!corpus.info()) continue;
    const CorpusInfo& info = *corpus.info();
    MARROW_CHECK(info.vocab_size <= options_.vocab_size, ExitCode::kBadInput,
                 Fix("tokenize the text with the model's tokenizer, or raise vocab_size in the model's config.json"),
                 "corpus {} was tokenized with {}, whose vocabulary of {} exceeds the model's vocab_size {}",
                 corpus.prefix(), info.tokenizer, info.vocab_size, options_.vocab_size);
    if (known == nullptr) known = &corpus;
    tokenizer_hash_ = known->info()->tokenizer_hash;
    MARROW_CHECK(info.tokenizer_hash == tokenizer_hash_, ExitCode::kBadInput,
                 Fix("tokenize all corpora of a run with one tokenizer"),
                 "corpus {} was tokenized with {} (hash {}), but {} with {} (hash {})", corpus.prefix(), info.tokenizer,
                 info.tokenizer_hash, known->prefix(), known->info()->tokenizer, tokenizer_hash_);
  }
}

int64_t BatchLoader::samples_per_epoch(size_t source) const {
  return (corpora_.at(source).tokens() - 1) / options_.seq_len;
}

int64_t BatchLoader::samples_per_epoch() const {
  int64_t sum = 0;
  for (size_t k = 0; k < corpora_.size(); ++k) sum += samples_per_epoch(k);
  return sum;
}

BatchLoader::Sample BatchLoader::sample_at(int64_t index) const {
  const auto [source, drawn] = blend_.at(index);
  const int64_t epoch_size = samples_per_epoch(static_cast<size_t>(source));
  const int64_t epoch = drawn / epoch_size, in_epoch = drawn % epoch_size;
  const int64_t sample =
      options_.shuffle ? Permutation(epoch_size, permutation_key(options_.seed, source, epoch))(in_epoch) : in_epoch;
  return {&corpora_[static_cast<size_t>(source)], sample * options_.seq_len};
}

template <typename Mask>
void BatchLoader::for_document_ends(const Sample& sample, const Mask& mask) const {
  const IndexedCorpus& corpus = *sample.corpus;
  int64_t before = 0;
  // A boundary right behind the sequence counts too: its last target belongs to the next document.
  for (int64_t d = corpus.document_after(sample.first); d < corpus.documents(); ++d) {
    const int64_t begin = corpus.document_begin(d) - sample.first;
    if (begin > options_.seq_len) break;
    if (begin != before) mask(begin - 1);  // empty documents begin where the next does
    before = begin;
  }
}

SequenceBatch BatchLoader::load(int64_t first, int64_t count) const {
  const auto size = static_cast<size_t>(count * options_.seq_len);
  SequenceBatch batch{.sequences = count,
                      .seq_len = options_.seq_len,
                      .tokens = std::vector<int32_t>(size),
                      .targets = std::vector<int32_t>(size),
                      .document_start = std::vector<int32_t>(size),
                      .mask_documents = options_.mask_documents};
  for (int64_t i = 0; i < count; ++i) fill(sample_at(first + i), i, batch);
  return batch;
}

int64_t BatchLoader::count_targets(int64_t first, int64_t count) const {
  int64_t targets = count * options_.seq_len;
  for (int64_t i = 0; options_.mask_documents && i < count; ++i) {
    for_document_ends(sample_at(first + i), [&](int64_t) { --targets; });
  }
  return targets;
}

void BatchLoader::fill(const Sample& sample, int64_t sequence, SequenceBatch& batch) const {
  const int64_t length = options_.seq_len;
  const auto row = [&](std::vector<int32_t>& values) {
    return std::span(values).subspan(static_cast<size_t>(sequence * length), static_cast<size_t>(length));
  };
  const std::span<int32_t> tokens = row(batch.tokens), targets = row(batch.targets);
  sample.corpus->read(sample.first, tokens, options_.vocab_size);
  std::copy(tokens.begin() + 1, tokens.end(), targets.begin());
  sample.corpus->read(sample.first + length, targets.last(1), options_.vocab_size);
  if (!options_.mask_documents) return;
  for_document_ends(sample, [&](int64_t end) {
    targets[static_cast<size_t>(end)] = -1;
    std::ranges::fill(row(batch.document_start).subspan(static_cast<size_t>(end + 1)), static_cast<int32_t>(end + 1));
  });
}

std::string BatchLoader::fingerprint() const {
  std::string text;
  for (size_t k = 0; k < corpora_.size(); ++k) {
    const IndexedCorpus& corpus = corpora_[k];
    text += fmt::format("{}{} documents, {} tokens, dtype {}, tokenizer {}, content {}, share {}/{}",
                        k == 0 ? "" : "; ", corpus.documents(), corpus.tokens(), corpus.dtype_code(),
                        corpus.info() ? corpus.info()->tokenizer_hash : "unknown", corpus.content_hash(),
                        blend_.per_period(static_cast<int64_t>(k)), blend_.period());
  }
  return text;
}

std::vector<std::string> BatchLoader::warnings() const {
  std::vector<std::string> warnings;
  for (const IndexedCorpus& corpus : corpora_) {
    if (!corpus.warning().empty()) warnings.push_back(corpus.warning());
  }
  return warnings;
}

}  // namespace marrow
