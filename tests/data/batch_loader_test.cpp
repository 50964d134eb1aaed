#include "data/batch_loader.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "corpus_testing.h"

namespace marrow {
namespace {

class BatchLoaderTest : public CorpusFolder {
 protected:
  // Documents of the given lengths; the tokens count up from 0 over the whole corpus.
  std::string counting(const std::string& name, const std::vector<int32_t>& lengths, int64_t vocab_size = 100000) {
    std::vector<std::vector<int32_t>> documents;
    int32_t next = 0;
    for (const int32_t length : lengths) {
      documents.emplace_back(static_cast<size_t>(length));
      std::iota(documents.back().begin(), documents.back().end(), next);
      next += length;
    }
    return corpus(name, documents, vocab_size);
  }
  static BatchLoader::Options options(const std::vector<CorpusWeight>& sources, int64_t seq_len) {
    return {.sources = sources, .seq_len = seq_len, .seed = 1, .vocab_size = 100000};
  }
};

using Ids = std::vector<int32_t>;

TEST_F(BatchLoaderTest, WindowsInOrder) {
  auto wanted = options({{counting("c", {5, 6})}}, 3);
  wanted.shuffle = false;
  const BatchLoader loader(wanted);
  EXPECT_EQ(loader.samples_per_epoch(), 3);  // 11 tokens: 3 windows and their last target, 1 over
  const SequenceBatch batch = loader.load(0, 4);
  EXPECT_EQ(batch.sequences, 4);
  EXPECT_EQ(batch.seq_len, 3);
  EXPECT_EQ(batch.tokens, (Ids{0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2}));
  EXPECT_EQ(batch.targets, (Ids{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}));
  EXPECT_EQ(batch.document_start, Ids(12, 0));  // no masking
  EXPECT_EQ(BatchLoader(options({{counting("ten", {10})}}, 3)).samples_per_epoch(), 3);
  EXPECT_EQ(BatchLoader(options({{counting("nine", {9})}}, 3)).samples_per_epoch(), 2);
}

// Case A4's data: a boundary inside, at the end of a sequence, and a document that runs on.
TEST_F(BatchLoaderTest, PackedDocuments) {
  auto wanted = options({{counting("c", {1, 7, 31, 25, 16, 16, 16, 16, 1})}}, 64);
  wanted.shuffle = false;
  wanted.mask_documents = true;
  const BatchLoader loader(wanted);
  const SequenceBatch batch = loader.load(0, 2);
  Ids starts, targets(batch.targets.size());
  const auto add = [&](int count, int start) { starts.insert(starts.end(), count, start); };
  add(1, 0), add(7, 1), add(31, 8), add(25, 39);
  for (const int start : {0, 16, 32, 48}) add(16, start);
  EXPECT_EQ(batch.document_start, starts);
  std::iota(targets.begin(), targets.end(), 1);
  for (const size_t last : {0, 7, 38, 63, 79, 95, 111, 127}) targets[last] = -1;
  EXPECT_EQ(batch.targets, targets);
  const auto first = batch.targets.begin();
  EXPECT_EQ(std::count_if(first, first + 64, [](int32_t t) { return t >= 0; }), 60);
}

TEST_F(BatchLoaderTest, ADocumentThatRunsInStartsAtZero) {
  auto wanted = options({{counting("c", {6, 0, 0, 3, 8})}}, 4);
  wanted.shuffle = false;
  wanted.mask_documents = true;
  const SequenceBatch batch = BatchLoader(wanted).load(0, 4);
  EXPECT_EQ(batch.document_start, (Ids{0, 0, 0, 0, 0, 0, 2, 2, 0, 1, 1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(batch.targets, (Ids{1, 2, 3, 4, 5, -1, 7, 8, -1, 10, 11, 12, 13, 14, 15, 16}));
}

// Case S2's data: documents of 11 and 101 tokens have 10 and 100 targets.
TEST_F(BatchLoaderTest, TargetsPerDocument) {
  auto wanted = options({{counting("c", {11, 101, 1})}}, 112);
  wanted.mask_documents = true;
  const SequenceBatch batch = BatchLoader(wanted).load(0, 1);
  EXPECT_EQ(std::count_if(batch.targets.begin(), batch.targets.end(), [](int32_t target) { return target >= 0; }), 110);
  EXPECT_EQ(batch.targets[10], -1);
  EXPECT_EQ(batch.targets[111], -1);
}

TEST_F(BatchLoaderTest, CountsTheTargetsItLoads) {
  const std::vector<std::string> corpora{counting("c", {6, 0, 0, 3, 8, 1, 1, 0, 40, 2}), counting("d", {90, 31, 4, 0})};
  for (const int64_t length : {1, 4, 7, 25}) {
    for (const bool masked : {false, true}) {
      auto wanted = options({{corpora[0], 1}, {corpora[1], 2}}, length);
      wanted.mask_documents = masked;
      const BatchLoader loader(wanted);
      int64_t fewer = 0;
      for (const auto& [first, count] : std::vector<std::pair<int64_t, int64_t>>{{0, 50}, {3, 1}, {17, 40}, {5, 0}}) {
        const SequenceBatch batch = loader.load(first, count);
        const int64_t trained = std::ranges::count_if(batch.targets, [](int32_t target) { return target >= 0; });
        EXPECT_EQ(loader.count_targets(first, count), trained) << length << (masked ? " masked" : "");
        fewer += count * length - trained;
      }
      EXPECT_EQ(fewer > 0, masked);
    }
  }
}

TEST_F(BatchLoaderTest, EpochsPermuteAnewAndAnySplitGivesTheSameOrder) {
  const BatchLoader loader(options({{counting("c", {401})}}, 4));
  const int64_t epoch = loader.samples_per_epoch();
  ASSERT_EQ(epoch, 100);
  const SequenceBatch all = loader.load(0, 3 * epoch);
  std::vector<Ids> orders;
  for (int64_t e = 0; e < 3; ++e) {
    Ids order;
    for (int64_t i = 0; i < epoch; ++i) {
      const size_t at = static_cast<size_t>((e * epoch + i) * 4);
      order.push_back(all.tokens[at]);
      EXPECT_EQ(all.targets[at + 3], all.tokens[at] + 4);
    }
    EXPECT_EQ(std::set<int32_t>(order.begin(), order.end()).size(), 100u);
    orders.push_back(order);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
  Ids pieces;
  for (int64_t first = 0; first < 3 * epoch; first += 7) {
    const SequenceBatch part = loader.load(first, std::min<int64_t>(7, 3 * epoch - first));
    pieces.insert(pieces.end(), part.tokens.begin(), part.tokens.end());
  }
  EXPECT_EQ(pieces, all.tokens);
  auto other = options({{path("c")}}, 4);
  other.seed = 2;
  EXPECT_NE(BatchLoader(other).load(0, 100).tokens, loader.load(0, 100).tokens);
}

// Case T4. Two folders with the same corpus stand for two nodes.
TEST_F(BatchLoaderTest, BlendsCountAndWrap) {
  const std::string one = counting("node1/one", {81}), two = counting("node1/two", {81});
  const BatchLoader loader(options({{one, 0.999}, {two, 0.001}}, 8));
  const BatchLoader elsewhere(options({{counting("node2/one", {81}), 0.999}, {counting("node2/two", {81}), 0.001}}, 8));
  EXPECT_EQ(loader.load(0, 10000).tokens, elsewhere.load(0, 10000).tokens);
  EXPECT_EQ(loader.fingerprint(), elsewhere.fingerprint());
  EXPECT_EQ(loader.samples_per_epoch(0), 10);
  // The heavy corpus gives each of its 10 windows 999 times in 9,990 draws.
  const SequenceBatch batch = loader.load(0, 10000);
  std::vector<int> counts(10);
  for (int64_t i = 0; i < 10000; ++i) ++counts[static_cast<size_t>(batch.tokens[i * 8] / 8)];
  for (const int count : counts) EXPECT_EQ(count, 1000);
}

TEST_F(BatchLoaderTest, SwappedDataChangeTheFingerprint) {
  const std::string prefix = corpus("c", {{1, 2, 3}, {4, 5, 6}});
  const auto fingerprint = [&] { return BatchLoader(options({{prefix}}, 2)).fingerprint(); };
  const std::string before = fingerprint();
  corpus("c", {{1, 2, 3}, {4, 5, 6}});
  EXPECT_EQ(fingerprint(), before);
  corpus("c", {{1, 2, 3}, {4, 5, 7}});  // the same sizes, another token
  EXPECT_NE(fingerprint(), before);
  corpus("c", {{1, 2}, {3, 4, 5, 6}});  // another boundary
  EXPECT_NE(fingerprint(), before);
  corpus("c", {{1, 2, 3}, {4, 5, 6}}, 257, "other tokenizer");
  EXPECT_NE(fingerprint(), before);
  // One changed share of a blend is another order.
  const std::string d = corpus("d", {{1, 2, 3}}, 257, "other tokenizer");
  EXPECT_NE(BatchLoader(options({{prefix, 1}, {d, 1}}, 2)).fingerprint(),
            BatchLoader(options({{prefix, 2}, {d, 1}}, 2)).fingerprint());
}

TEST_F(BatchLoaderTest, UnusableCorporaAreRefusedByName) {
  const std::string good = counting("good", {100});
  const std::string empty = counting("empty", {});
  ErrorReport report = error_of([&] { BatchLoader(options({{good}, {empty}}, 8)); });
  EXPECT_EQ(report.code, ExitCode::kBadInput);
  expect_contains(report.what, {empty, "0 documents and 0 tokens"});

  const std::string tiny = counting("tiny", {8});
  report = error_of([&] { BatchLoader(options({{good}, {tiny}}, 8)); });
  EXPECT_EQ(report.code, ExitCode::kBadInput);
  expect_contains(report.what, {tiny, "8 tokens", "seq_len 8"});
  expect_contains(report.fix, {"data.seq_len"});

  const std::string other = corpus("other", {Ids(100, 1)}, 100000, "another");
  report = error_of([&] { BatchLoader(options({{good}, {other}}, 8)); });
  EXPECT_EQ(report.code, ExitCode::kBadInput);
  expect_contains(report.what, {good, other, "another"});

  const std::string large = counting("large", {100}, 151936);
  report = error_of([&] { BatchLoader(options({{large}}, 8)); });
  expect_contains(report.what, {large, "151936", "100000"});

  report = error_of([&] { BatchLoader(options({{path("none")}}, 8)); });
  EXPECT_EQ(report.code, ExitCode::kUsage);
  report = error_of([&] { BatchLoader(options({}, 8)); });
  EXPECT_EQ(report.code, ExitCode::kUsage);
  report = error_of([&] { BatchLoader(options({{good, -1.0}}, 8)); });
  EXPECT_EQ(report.code, ExitCode::kUsage);
  report = error_of([&] { BatchLoader(options({{good}}, 0)); });
  expect_contains(report.fix, {"data.seq_len"});
}

TEST_F(BatchLoaderTest, ACorpusTruncatedBetweenTwoBatchesIsNamed) {
  for (const std::string suffix : {".bin", ".idx"}) {
    const std::string prefix = corpus("c" + suffix, std::vector(2000, Ids(20, 7)));
    auto wanted = options({{prefix}}, 64);
    wanted.mask_documents = true;
    const BatchLoader loader(wanted);
    loader.load(0, 8);
    OutputFile(prefix + suffix, true).truncate_to(0);
    const ErrorReport report = error_of([&] { loader.load(8, 8); });
    EXPECT_EQ(report.code, ExitCode::kBadInput);
    expect_contains(report.what, {prefix + suffix, "while it was in use"});
  }
}

TEST_F(BatchLoaderTest, ForeignCorporaWarnAndEveryIdIsChecked) {
  const std::string prefix = corpus("c", {Ids{1, 2, 3, 4, 100, 6, 7, 8, 9}}, 257);
  std::filesystem::remove(prefix + ".json");
  auto wanted = options({{prefix}}, 4);
  wanted.vocab_size = 100;
  wanted.shuffle = false;
  const BatchLoader loader(wanted);
  ASSERT_EQ(loader.warnings().size(), 1u);
  expect_contains(loader.warnings()[0], {prefix});
  EXPECT_EQ(loader.tokenizer_hash(), "");
  // The bad id is the last target of the first window already.
  expect_contains(error_of([&] { loader.load(0, 1); }).what, {prefix, "token 4", "id 100", "vocab_size is 100"});
  wanted.vocab_size = 101;
  EXPECT_EQ(BatchLoader(wanted).load(0, 1).targets, (Ids{2, 3, 4, 100}));
}

}  // namespace
}  // namespace marrow
