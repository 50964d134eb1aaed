#include "data/indexed_corpus.h"

#include <cstdlib>
#include <cstring>

#include "corpus_testing.h"

namespace marrow {
namespace {

class IndexedCorpusTest : public CorpusFolder {};

std::vector<int32_t> read_all(const IndexedCorpus& corpus, int64_t vocab_size) {
  std::vector<int32_t> ids(static_cast<size_t>(corpus.tokens()));
  corpus.read(0, ids, vocab_size);
  return ids;
}

int run_oracle(const std::string& arguments) {
  const std::string root = MARROW_SOURCE_DIR;
  return std::system((root + "/.venv/bin/python " + root + "/tests/oracle/corpus_format.py " + arguments).c_str());
}

template <class T>
void put(const std::string& path, int64_t offset, T value) {
  OutputFile file(path, true);
  file.write_at(offset, std::as_bytes(std::span(&value, 1)));
}

TEST_F(IndexedCorpusTest, IdsComeBackUnchanged) {
  const std::vector<std::vector<int32_t>> documents = {{0, 65535, 65536, 151935}, {}, {7}};
  const IndexedCorpus wide(corpus("wide", documents, 151936));
  EXPECT_EQ(wide.dtype_code(), 4);
  EXPECT_EQ(read_all(wide, 151936), (std::vector<int32_t>{0, 65535, 65536, 151935, 7}));
  EXPECT_EQ(wide.documents(), 3);
  EXPECT_EQ(wide.document_begin(1), 4);
  EXPECT_EQ(wide.document_begin(2), 4);
  EXPECT_EQ(wide.document_begin(3), 5);
  EXPECT_EQ(wide.document_after(3), 1);
  EXPECT_EQ(wide.document_after(4), 3);
  const IndexedCorpus narrow(corpus("narrow", {{0, 255, 65535}}, 65536));
  EXPECT_EQ(narrow.dtype_code(), 8);
  EXPECT_EQ(read_all(narrow, 65536), (std::vector<int32_t>{0, 255, 65535}));
}

// 65,536 ids are 0 to 65,535, which 16 bits hold; one more id does not fit.
TEST_F(IndexedCorpusTest, WidthFollowsTheVocabulary) {
  EXPECT_EQ(corpus_dtype_code(257), 8);
  EXPECT_EQ(corpus_dtype_code(65535), 8);
  EXPECT_EQ(corpus_dtype_code(65536), 8);
  EXPECT_EQ(corpus_dtype_code(65537), 4);
}

TEST_F(IndexedCorpusTest, InfoAndWarning) {
  CorpusWriter writer(path("c"), {"bytes", "abc", 257, 256}, false);
  writer.append(std::vector<int32_t>{1, 256}, std::vector<int32_t>{2});
  writer.finish();
  const IndexedCorpus corpus(path("c"));
  ASSERT_TRUE(corpus.info());
  EXPECT_EQ(corpus.info()->tokenizer_hash, "abc");
  EXPECT_EQ(corpus.info()->vocab_size, 257);
  EXPECT_EQ(corpus.info()->end_of_document, 256);
  EXPECT_EQ(corpus.warning(), "");
  std::filesystem::remove(path("c.json"));
  const IndexedCorpus foreign(path("c"));
  EXPECT_FALSE(foreign.info());
  expect_contains(foreign.warning(), {path("c.json"), "tokenizer is unknown"});
}

TEST_F(IndexedCorpusTest, AnIdOutsideTheVocabularyIsNamed) {
  const std::string prefix = corpus("c", {{1, 2, 3}, {4, 200, 5}}, 257);
  const IndexedCorpus corpus(prefix);
  std::vector<int32_t> out(4);
  corpus.read(0, out, 200);  // the bad one lies behind
  const ErrorReport report = error_of([&] { corpus.read(1, out, 200); });
  EXPECT_EQ(report.code, ExitCode::kBadInput);
  expect_contains(report.what, {prefix, "token 4", "id 200", "vocab_size is 200"});
  const std::string wide = this->corpus("w", {{1, 2, 3}}, 100000);
  put<int32_t>(wide + ".bin", 4, -5);
  const IndexedCorpus negative(wide);
  std::vector<int32_t> three(3);
  expect_contains(error_of([&] { negative.read(0, three, 100000); }).what, {"token 1", "id -5"});
}

TEST_F(IndexedCorpusTest, ExistingOutputIsKept) {
  const std::string prefix = corpus("c", {{1, 2}});
  const std::string before = read_bytes(prefix + ".bin");
  const CorpusInfo info{"test", "h", 257, {}};
  const ErrorReport report = error_of([&] { CorpusWriter(prefix, info, false); });
  EXPECT_EQ(report.code, ExitCode::kUsage);
  expect_contains(report.what, {prefix + ".idx"});
  expect_contains(report.fix, {"--overwrite"});
  {
    CorpusWriter unfinished(prefix, info, true);
    unfinished.append(std::vector<int32_t>{9}, std::vector<int32_t>{1});
    const ErrorReport busy = error_of([&] { CorpusWriter(prefix, info, true); });
    expect_contains(busy.what, {"another run", prefix});
  }
  EXPECT_EQ(read_bytes(prefix + ".bin"), before);
  EXPECT_FALSE(std::filesystem::exists(prefix + ".bin.marrow-tmp"));
  EXPECT_FALSE(std::filesystem::exists(prefix + ".idx.marrow-tmp"));
}

TEST_F(IndexedCorpusTest, MissingFilesAreUsageErrors) {
  ErrorReport report = error_of([&] { IndexedCorpus corpus(path("none")); });
  EXPECT_EQ(report.code, ExitCode::kUsage);
  expect_contains(report.what, {path("none.idx")});
  const std::string prefix = corpus("c", {{1, 2}});
  std::filesystem::remove(prefix + ".bin");
  report = error_of([&] { IndexedCorpus corpus(prefix); });
  expect_contains(report.what, {prefix + ".bin"});
}

// Offsets in an index of three documents: magic 0, version 9, dtype 17, counts 18 and 26, lengths
// 34, pointers 46, document indices 70, end 102.
TEST_F(IndexedCorpusTest, EveryContradictionIsRefused) {
  struct Damage {
    const char* name;
    std::function<void(const std::string&)> apply;
    std::vector<std::string> expected;
  };
  const Damage damages[] = {
      {"magic", [](const std::string& p) { put<char>(p + ".idx", 0, 'X'); }, {"XMIDIDX", "MMIDIDX"}},
      {"version", [](const std::string& p) { put<uint64_t>(p + ".idx", 9, 2); }, {"version 2"}},
      {"dtype", [](const std::string& p) { put<uint8_t>(p + ".idx", 17, 7); }, {"dtype code 7"}},
      {"width", [](const std::string& p) { put<uint8_t>(p + ".idx", 17, 4); }, {"byte 4", "end at 8"}},
      {"sequences", [](const std::string& p) { put<uint64_t>(p + ".idx", 18, 4); }, {"4 sequences", "102 bytes"}},
      {"huge count", [](const std::string& p) { put<uint64_t>(p + ".idx", 18, UINT64_MAX / 2); }, {"102 bytes"}},
      {"indices", [](const std::string& p) { put<uint64_t>(p + ".idx", 26, 0); }, {"0 document indices"}},
      {"negative length", [](const std::string& p) { put<int32_t>(p + ".idx", 34, -2); }, {"sequence 0", "length -2"}},
      {"length", [](const std::string& p) { put<int32_t>(p + ".idx", 34, 3); }, {"sequence 1", "byte 4", "6"}},
      {"long length",
       [](const std::string& p) { put<int32_t>(p + ".idx", 42, INT32_MAX); },
       {"sequence 2", "12 bytes"}},
      {"short length", [](const std::string& p) { put<int32_t>(p + ".idx", 42, 0); }, {"12"}},
      {"pointer", [](const std::string& p) { put<int64_t>(p + ".idx", 54, -4); }, {"sequence 1", "-4"}},
      {"first document",
       [](const std::string& p) { put<int64_t>(p + ".idx", 70, 1); },
       {"document index 0 is 1", "expected 0"}},
      {"document order",
       [](const std::string& p) { put<int64_t>(p + ".idx", 78, 3); },
       {"document index 2 is 2", "3 to 3"}},
      {"document range", [](const std::string& p) { put<int64_t>(p + ".idx", 78, INT64_MAX); }, {"document index 1"}},
      {"last document",
       [](const std::string& p) { put<int64_t>(p + ".idx", 94, 2); },
       {"document index 3 is 2", "expected 3"}},
      {"cut index", [](const std::string& p) { OutputFile(p + ".idx", true).truncate_to(101); }, {"101 bytes"}},
      {"cut header", [](const std::string& p) { OutputFile(p + ".idx", true).truncate_to(20); }, {"20 bytes", "34"}},
      {"cut tokens",
       [](const std::string& p) { OutputFile(p + ".bin", true).truncate_to(11); },
       {"byte 12", "11 bytes"}},
      {"empty tokens", [](const std::string& p) { OutputFile(p + ".bin", true).truncate_to(0); }, {"0 bytes"}},
      {"more tokens", [](const std::string& p) { OutputFile(p + ".bin", true).truncate_to(14); }, {"12 bytes", "14"}},
  };
  for (const Damage& damage : damages) {
    const std::string prefix = corpus("c", {{1, 2}, {3}, {4, 5, 6}});
    damage.apply(prefix);
    const ErrorReport report = error_of([&] { IndexedCorpus corpus(prefix); });
    EXPECT_EQ(report.code, ExitCode::kBadInput) << damage.name;
    EXPECT_NE(report.what.find(prefix), std::string::npos) << damage.name;
    expect_contains(report.what, damage.expected);
  }
}

TEST_F(IndexedCorpusTest, DisagreeingDescriptionIsRefused) {
  const std::string prefix = corpus("c", {{1, 2}, {3}});
  const std::string json = read_bytes(prefix + ".json");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = json;
    changed.replace(changed.find(from), from.size(), to);
    write("c.json", changed);
    return error_of([&] { IndexedCorpus corpus(prefix); }).what;
  };
  expect_contains(with("\"tokens\": 3", "\"tokens\": 4"), {"tokens", "4", "3"});
  expect_contains(with("\"documents\": 2", "\"documents\": 1"), {"documents", "1", "2"});
  expect_contains(with("257", "70000"), {"70000", "dtype code 8"});
  expect_contains(with("\"vocab_size\"", "\"vocabulary\""), {"vocab_size", "missing"});
  expect_contains(with("{", "["), {"c.json"});
  expect_contains(with("\"vocab_size\": 257", "\"vocab_size\": -5"), {"c.json: vocab_size: -5"});
  expect_contains(with("\"vocab_size\": 257", "\"vocab_size\": 0"), {"c.json: vocab_size: 0"});
  expect_contains(with("\"vocab_size\": 257", "\"vocab_size\": 4294967553"), {"c.json: vocab_size: 4294967553"});
  expect_contains(with("\"vocab_size\": 257", "\"vocab_size\": \"many\""), {"c.json: vocab_size: expected an integer"});
  expect_contains(with("\"tokenizer\": \"test\"", "\"tokenizer\": 3"), {"c.json: tokenizer: expected a string"});
  for (const char* id : {"257", "-1", "4294967296", "0.5", "\"x\""}) {
    const std::string what = with("\"end_of_document\": null", fmt::format("\"end_of_document\": {}", id));
    expect_contains(what, {"c.json: end_of_document: ", id});
  }
  expect_contains(with("\"bin_crc32\": ", "\"bin_crc32\": -"), {"c.json: bin_crc32: -"});
}

// Any single changed byte of an index is refused or leaves a corpus that reads within its bounds.
TEST_F(IndexedCorpusTest, ChangedBytesNeverReadOutside) {
  const std::string prefix = corpus("c", {{1, 2}, {}, {4, 5, 6}});
  std::filesystem::remove(prefix + ".json");
  const std::string good = read_bytes(prefix + ".idx");
  int opened = 0;
  for (size_t at = 0; at < good.size(); ++at) {
    for (const int change : {0x01, 0x80, 0xFF}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ change);
      write("c.idx", bad);
      try {
        const IndexedCorpus corpus(prefix);
        ++opened;
        for (int64_t d = 0; d <= corpus.documents(); ++d) {
          EXPECT_LE(corpus.document_begin(d), corpus.tokens());
        }
        (void)corpus.content_hash();
        (void)read_all(corpus, INT32_MAX);
      } catch (const Error& error) {
        EXPECT_NE(error.report().code, ExitCode::kDiverged);
      }
    }
  }
  EXPECT_GT(opened, 0);    // some bytes only move a document boundary or the sign of ids
  EXPECT_LT(opened, 100);  // of 318
}

// The checksum that the writer kept tells a PREFIX.bin of another corpus, wherever the two differ.
TEST_F(IndexedCorpusTest, ContentHashCoversEveryToken) {
  const std::vector<int32_t> document(3 << 20, 7);  // 6 MiB
  const std::string prefix = corpus("c", {document});
  const std::string before = IndexedCorpus(prefix).content_hash();
  put<uint16_t>(prefix + ".bin", 10 << 10, 8);
  const ErrorReport report = error_of([&] { (void)IndexedCorpus(prefix).content_hash(); });
  EXPECT_EQ(report.code, ExitCode::kBadInput);
  expect_contains(report.what, {"c.bin", "bin_crc32", "c.json"});
  std::filesystem::remove(prefix + ".json");  // then no checksum is known
  EXPECT_NE(IndexedCorpus(prefix).content_hash(), before);
  std::vector<int32_t> other = document;
  other[5000] = 8;
  EXPECT_NE(IndexedCorpus(corpus("c", {other})).content_hash(), before);
  EXPECT_EQ(IndexedCorpus(corpus("c", {document})).content_hash(), before);
}

// Of a corpus over 256 MiB not every byte is read, but its checksum enters.
TEST_F(IndexedCorpusTest, ChecksumOfAHugeCorpusEnters) {
  const std::string prefix = corpus("c", {{1}});
  OutputFile(prefix + ".bin", true).truncate_to(int64_t{400} << 20);
  put<int32_t>(prefix + ".idx", 34, 200 << 20);
  const auto hash = [&](uint32_t checksum) {
    write("c.json",
          fmt::format(R"({{"tokenizer": "t", "tokenizer_hash": "h", "vocab_size": 257, "end_of_document": null,
                                     "documents": 1, "tokens": {}, "bin_crc32": {}}})",
                      200 << 20, checksum));
    return IndexedCorpus(prefix).content_hash();
  };
  EXPECT_NE(hash(1), hash(2));
}

// To read what a mapped file has lost would end the process by a signal.
TEST_F(IndexedCorpusTest, ACorpusTruncatedWhileInUseIsAnError) {
  const std::string prefix = corpus("c", std::vector(2000, std::vector<int32_t>(20, 7)));
  const IndexedCorpus corpus(prefix);
  std::vector<int32_t> ids(30);
  corpus.read(39000, ids, 257);
  EXPECT_EQ(corpus.document_after(39000), 1951);
  OutputFile(prefix + ".bin", true).truncate_to(4096);
  ErrorReport report = error_of([&] { corpus.read(39000, ids, 257); });
  EXPECT_EQ(report.code, ExitCode::kBadInput);
  expect_contains(report.what, {prefix + ".bin", "80000", "4096"});
  expect_contains(report.fix, {prefix + ".bin"});
  EXPECT_EQ(error_of([&] { (void)corpus.content_hash(); }).code, ExitCode::kBadInput);
  EXPECT_EQ(corpus.document_after(39000), 1951);  // the index is whole
  OutputFile(prefix + ".idx", true).truncate_to(4096);
  report = error_of([&] { (void)corpus.document_after(39000); });
  EXPECT_EQ(report.code, ExitCode::kBadInput);
  expect_contains(report.what, {prefix + ".idx", "4096"});
}

TEST_F(IndexedCorpusTest, BeyondTwoToTheThirtyOneTokens) {
  for (const int64_t vocab_size : {257, 100000}) {
    const int64_t width = vocab_size == 257 ? 2 : 4;
    const std::vector<int32_t> lengths = {INT32_MAX, 1000, 5};
    const int64_t tokens = int64_t{INT32_MAX} + 1005;
    const std::string prefix = path("sparse");
    std::vector<std::byte> header(34);
    std::memcpy(header.data(), "MMIDIDX\0\0", 9);
    const uint64_t version = 1, sequences = 3, indices = 4;
    const uint8_t code = width == 2 ? 8 : 4;
    std::memcpy(&header[9], &version, 8);
    std::memcpy(&header[17], &code, 1);
    std::memcpy(&header[18], &sequences, 8);
    std::memcpy(&header[26], &indices, 8);
    {
      const int64_t offsets[] = {0, INT32_MAX * width, (tokens - 5) * width};
      const int64_t documents[] = {0, 1, 2, 3};
      OutputFile idx(prefix + ".idx");
      idx.append(header);
      idx.append(std::as_bytes(std::span(lengths)));
      idx.append(std::as_bytes(std::span(offsets)));
      idx.append(std::as_bytes(std::span(documents)));
    }
    OutputFile(prefix + ".bin").truncate_to(tokens * width);
    put<uint16_t>(prefix + ".bin", (tokens - 5) * width, 77);
    put<uint16_t>(prefix + ".bin", (tokens - 1) * width, 99);
    const IndexedCorpus corpus(prefix);
    EXPECT_EQ(corpus.tokens(), tokens);
    EXPECT_EQ(corpus.document_begin(2), tokens - 5);
    EXPECT_EQ(corpus.document_after(tokens - 6), 2);
    std::vector<int32_t> last(5);
    corpus.read(corpus.document_begin(2), last, vocab_size);
    EXPECT_EQ(last, (std::vector<int32_t>{77, 0, 0, 0, 99}));
    EXPECT_EQ(corpus.content_hash().size(), 24u);
  }
}

TEST_F(IndexedCorpusTest, NumpyReadsOurs) {
  const std::string prefix = corpus("c", {{0, 65535}, {}, {70000, 1, 2}}, 151936);
  EXPECT_EQ(run_oracle("check " + prefix + " '[[0,65535],[],[70000,1,2]]' int32"), 0);
  const std::string narrow = corpus("n", {{5}, {6, 256}}, 257);
  EXPECT_EQ(run_oracle("check " + narrow + " '[[5],[6,256]]' uint16"), 0);
  EXPECT_NE(run_oracle("check " + narrow + " '[[5],[6,255]]' uint16 2>/dev/null"), 0);
}

TEST_F(IndexedCorpusTest, WeReadNumpys) {
  for (const auto& [dtype, code] :
       {std::pair{"uint8", 1}, {"int8", 2}, {"int16", 3}, {"int32", 4}, {"int64", 5}, {"uint16", 8}}) {
    ASSERT_EQ(run_oracle("write " + path(dtype) + " '[[[1,2],[3]],[[]],[[100,5],[6]]]' " + dtype), 0);
    const IndexedCorpus corpus(path(dtype));
    EXPECT_EQ(corpus.dtype_code(), code);
    EXPECT_EQ(read_all(corpus, 101), (std::vector<int32_t>{1, 2, 3, 100, 5, 6})) << dtype;
    EXPECT_EQ(corpus.sequences(), 5);  // documents of more than one sequence
    EXPECT_EQ(corpus.documents(), 3);
    EXPECT_EQ(corpus.document_begin(2), 3);
    std::vector<int32_t> all(6);
    expect_contains(error_of([&] { corpus.read(0, all, 100); }).what, {"token 3", "id 100"});
  }
}

}  // namespace
}  // namespace marrow
