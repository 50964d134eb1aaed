#include "data/tokenize_corpus.h"

#include <fmt/ranges.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <random>
#include <thread>

#include "corpus_testing.h"

namespace marrow {
namespace {

class TokenizeCorpusTest : public CorpusFolder {
 protected:
  TokenizeCorpusTest() { logger_.set_quiet(true); }

  TokenizeOptions options(const std::string& output) const {
    TokenizeOptions options;
    options.inputs = {path("in")};
    options.output = path(output);
    return options;
  }
  TokenizeResult run(const TokenizeOptions& options) { return tokenize_corpus(options, *tokenizer_, logger_); }
  // Files of many kinds and sizes, some lines broken.
  void write_inputs() {
    std::mt19937 random(5);
    const auto text = [&](size_t size) {
      std::string out;
      for (size_t i = 0; i < size; ++i) out += static_cast<char>('a' + random() % 26);
      return out;
    };
    for (int i = 0; i < 200; ++i) write(fmt::format("in/t{:03}.txt", i), text(1 + random() % 3000));
    std::string lines;
    for (int i = 0; i < 3000; ++i) {
      lines += i % 500 == 7 ? "broken\n" : fmt::format("{{\"text\":\"{}\"}}\n", text(1 + random() % 900));
    }
    write("in/lines.jsonl", lines);
    write("in/large.txt", text(3000000));
  }

  std::unique_ptr<Tokenizer> tokenizer_ = open_tokenizer("bytes");
  Logger logger_;
};

TEST_F(TokenizeCorpusTest, DocumentsTokensAndDescription) {
  write("in/a.txt", "hello");
  write("in/b.jsonl", "{\"text\":\"x\\ny\"}\n{\"text\":\"\\u00e9\"}\n");
  const TokenizeResult result = run(options("out/c"));
  EXPECT_EQ(result.documents, 3);
  EXPECT_EQ(result.bytes, 5 + 3 + 2);
  EXPECT_EQ(result.tokens, 10 + 3);
  EXPECT_EQ(result.skipped, 0);
  EXPECT_GT(result.seconds, 0);
  const IndexedCorpus corpus(path("out/c"));
  std::vector<int32_t> ids(13);
  corpus.read(0, ids, 257);
  EXPECT_EQ(ids, (std::vector<int32_t>{'h', 'e', 'l', 'l', 'o', 256, 'x', '\n', 'y', 256, 0xC3, 0xA9, 256}));
  EXPECT_EQ(corpus.documents(), 3);
  EXPECT_EQ(corpus.document_begin(1), 6);
  ASSERT_TRUE(corpus.info());
  EXPECT_EQ(corpus.info()->tokenizer, "bytes");
  EXPECT_EQ(corpus.info()->tokenizer_hash, tokenizer_->hash());
  EXPECT_EQ(corpus.info()->end_of_document, 256);

  TokenizeOptions bare = options("bare");
  bare.append_end_of_document = false;
  EXPECT_EQ(run(bare).tokens, 10);
  EXPECT_FALSE(IndexedCorpus(path("bare")).info()->end_of_document);
}

TEST_F(TokenizeCorpusTest, AnyNumberOfWorkersWritesTheSameBytes) {
  write_inputs();
  std::vector<std::string> expected;
  for (const int64_t workers : {1, 2, 3, 8}) {
    TokenizeOptions wanted = options(fmt::format("w{}", workers));
    wanted.workers = workers;
    wanted.skip_faults = true;
    wanted.limits.block_bytes = 20000;
    const TokenizeResult result = run(wanted);
    EXPECT_EQ(result.documents, 200 + 3000 - 6 + 1);
    EXPECT_EQ(result.skipped, 6);
    EXPECT_EQ(result.faults.at(input_fault::kNotJson), 6);
    std::vector<std::string> files;
    for (const char* suffix : {".bin", ".idx", ".json"}) {
      files.push_back(read_bytes(wanted.output + suffix));
    }
    if (expected.empty()) expected = files;
    EXPECT_TRUE(files == expected) << workers << " workers";
  }
}

TEST_F(TokenizeCorpusTest, StopsAtTheFirstFaultInFileOrder) {
  write_inputs();
  for (int i = 0; i < 5; ++i) {
    TokenizeOptions wanted = options("c");
    wanted.workers = 4;
    wanted.limits.block_bytes = 1000;
    const ErrorReport report = error_of([&] { run(wanted); });
    EXPECT_EQ(report.code, ExitCode::kBadInput);
    expect_contains(report.what, {path("in/lines.jsonl") + ":8: not JSON"});
    expect_contains(report.fix, {"--on-error skip"});
    for (const char* suffix : {".bin", ".idx", ".json", ".bin.marrow-tmp", ".idx.marrow-tmp"}) {
      EXPECT_FALSE(std::filesystem::exists(path("c") + suffix)) << suffix;
    }
  }
}

TEST_F(TokenizeCorpusTest, SkippedKindsAreCounted) {
  write("in/a.jsonl",
        "{\"text\":\"good\"}\nnope\n{\"a\":1}\n{\"text\":\"\"}\n{\"text\":\"\\ud83d\"}\n{\"text\":"
        "\"\xFF\"}\n");
  write("in/b.jsonl.gz", "no gzip");
  TokenizeOptions wanted = options("c");
  wanted.skip_faults = true;
  const TokenizeResult result = run(wanted);
  const std::string told = fmt::format("{}", fmt::join(logger_.warnings(), "\n"));
  EXPECT_EQ(result.documents, 1);
  EXPECT_EQ(result.skipped, 6);
  EXPECT_EQ(
      result.faults,
      (std::map<std::string_view, int64_t>{
          {"invalid UTF-8", 2}, {"empty document", 1}, {"not JSON", 1}, {"missing field", 1}, {"damaged file", 1}}));
  expect_contains(
      told, {"a.jsonl:2: skipped, not JSON", "a.jsonl:3: skipped, missing field", "a.jsonl:4: skipped, empty document",
             "a.jsonl:5: skipped, invalid UTF-8", "a.jsonl:6: skipped, invalid UTF-8",
             "b.jsonl.gz:1: skipped, damaged file", "skipped 6 inputs", "2 invalid UTF-8"});
}

TEST_F(TokenizeCorpusTest, NothingButFaultsIsAnError) {
  write("in/a.jsonl", "nope\n");
  TokenizeOptions wanted = options("c");
  wanted.skip_faults = true;
  expect_contains(error_of([&] { run(wanted); }).what, {"no document", "1 were skipped"});
  EXPECT_FALSE(std::filesystem::exists(path("c.idx")));
}

TEST_F(TokenizeCorpusTest, OverwriteAndInterrupt) {
  write("in/a.txt", "first");
  run(options("c"));
  const std::string before = read_bytes(path("c.bin"));
  write("in/a.txt", "second");
  expect_contains(error_of([&] { run(options("c")); }).what, {path("c.idx")});
  EXPECT_EQ(read_bytes(path("c.bin")), before);

  TokenizeOptions wanted = options("c");
  wanted.overwrite = true;
  wanted.stop = [] { return true; };
  expect_contains(error_of([&] { run(wanted); }).what, {"interrupted"});
  EXPECT_EQ(read_bytes(path("c.bin")), before);
  EXPECT_FALSE(std::filesystem::exists(path("c.bin.marrow-tmp")));

  wanted.stop = {};
  EXPECT_EQ(run(wanted).tokens, 7);
  EXPECT_EQ(IndexedCorpus(path("c")).tokens(), 7);
}

// A child is killed at many moments; what it leaves is no corpus, and a new run works.
TEST_F(TokenizeCorpusTest, KilledRunsLeaveNoCorpus) {
  write_inputs();
  TokenizeOptions wanted = options("c");
  wanted.skip_faults = true;
  wanted.workers = 2;
  wanted.limits.block_bytes = 500;
  int killed = 0, midway = 0;
  for (int attempt = 0; attempt < 20; ++attempt) {
    const pid_t child = fork();
    if (child == 0) {
      std::freopen("/dev/null", "w", stderr);
      wanted.overwrite = true;
      for (int i = 0; i < 1000; ++i) {  // busy until the signal
        run(wanted);
        for (const char* suffix : {".idx", ".bin", ".json"}) std::remove((wanted.output + suffix).c_str());
      }
      _exit(0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5 + 3 * attempt));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    killed += WIFSIGNALED(status);
    midway += std::filesystem::exists(path("c.bin.marrow-tmp"));
    if (std::filesystem::exists(path("c.idx"))) {
      EXPECT_EQ(IndexedCorpus(path("c")).documents(), 3195);  // all of it
    }
  }
  EXPECT_EQ(killed, 20);
  EXPECT_GT(midway, 0);
  wanted.overwrite = true;
  EXPECT_EQ(run(wanted).documents, 3195);
  EXPECT_EQ(IndexedCorpus(path("c")).documents(), 3195);
}

TEST_F(TokenizeCorpusTest, AFullDiskLeavesNothing) {
  write("in/a.txt", std::string(3000000, 'x'));
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000000, 1000000};
    setrlimit(RLIMIT_FSIZE, &limit);
    try {
      run(options("c"));
    } catch (const Error& error) {
      const bool told = error.report().what.find(path("c.bin.marrow-tmp")) != std::string::npos;
      _exit(told && error.report().code == ExitCode::kDeviceFault ? 0 : 2);
    }
    _exit(3);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    EXPECT_EQ(entry.path().filename(), "in");
  }
}

}  // namespace
}  // namespace marrow
