#include "data/document_source.h"

#include <sys/stat.h>
#include <zlib.h>
#include <zstd.h>

#include "corpus_testing.h"

namespace marrow {
namespace {

std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

std::string gzip(const std::string& text) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

class DocumentSourceTest : public CorpusFolder {
 protected:
  // All documents ("text") and faults ("file:line kind") of the inputs, in order.
  std::vector<std::string> read(const std::vector<std::string>& inputs, const DocumentSource::Limits& limits = {}) {
    DocumentSource source(inputs, limits);
    std::vector<std::string> out;
    InputBlock block;
    while (source.next(block)) {
      largest_block_ = std::max(largest_block_, block.text.capacity());
      read_documents(block, "text", [&](const Document& document) {
        const std::string name = std::filesystem::path(block.path).filename();
        const auto& fault = document.fault;
        out.push_back(fault ? fmt::format("<{}:{} {}>", name, fault->line, fault->fault) : std::string(document.text));
      });
    }
    EXPECT_EQ(source.disk_bytes_read(), source.disk_bytes());
    return out;
  }
  size_t largest_block_ = 0;
};

using Lines = std::vector<std::string>;

TEST_F(DocumentSourceTest, FilesFoldersAndOrder) {
  write("in/b.txt", "bee");
  write("in/a/z.md", "zed");
  write("in/a/y.py", "why");
  write("in/c.jsonl", "{\"text\":\"one\"}\n{\"text\":\"two\"}");
  write("in/.hidden/x.txt", "no");
  write("in/.secret", "no");
  const std::string last = write("last.txt", "last");
  EXPECT_EQ(read({path("in"), last}), (Lines{"why", "zed", "bee", "one", "two", "last"}));
}

TEST_F(DocumentSourceTest, MissingInputsAreUsageErrors) {
  ErrorReport report = error_of([&] { DocumentSource({path("none.txt")}, {}); });
  EXPECT_EQ(report.code, ExitCode::kUsage);
  expect_contains(report.what, {"none.txt"});
  std::filesystem::create_directories(path("empty"));
  report = error_of([&] { DocumentSource({path("empty")}, {}); });
  expect_contains(report.what, {"empty", "no file"});
}

TEST_F(DocumentSourceTest, TextStaysAsItIs) {
  const std::string odd(
      "\xEF\xBB\xBF"
      "a\0b\r\nc\r\n",
      11);
  write("odd.txt", odd);
  EXPECT_EQ(read({path("odd.txt")}), Lines{odd});
  // Before the first JSON line the mark is an encoding's sign, in a string it is text.
  write("bom.jsonl", "\xEF\xBB\xBF{\"text\":\"\xEF\xBB\xBFx\"}\r\n\r\n{\"text\":\"y\\r\\n\"}\r\n");
  EXPECT_EQ(read({path("bom.jsonl")}), (Lines{"\xEF\xBB\xBFx", "y\r\n"}));
}

TEST_F(DocumentSourceTest, EveryFaultOfALineIsLocated) {
  write("bad.jsonl",
        "{\"text\":\"ok\"}\n"
        "not json\n"
        "{\"other\":1}\n"
        "\n"
        "{\"text\":\"\"}\n"
        "{\"text\":\"\xFF\"}\n"
        "{\"text\":\"\\ud83d\"}\n"
        "{\"text\":\"\\ud83d\\ude00\"}\n"
        "{\"text\":3}");
  EXPECT_EQ(read({path("bad.jsonl")}),
            (Lines{"ok", "<bad.jsonl:2 not JSON>", "<bad.jsonl:3 missing field>", "<bad.jsonl:5 empty document>",
                   "<bad.jsonl:6 invalid UTF-8>", "<bad.jsonl:7 invalid UTF-8>", "\xF0\x9F\x98\x80",
                   "<bad.jsonl:9 missing field>"}));
}

TEST_F(DocumentSourceTest, FaultsOfTextFiles) {
  write("a.txt", "");
  write("b.txt",
        "one\ntwo\nthr\xC0\xAF"
        "ee\n");
  EXPECT_EQ(read({folder_}), (Lines{"<a.txt:1 empty document>", "<b.txt:3 invalid UTF-8>"}));
}

std::string many_lines(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += fmt::format("{{\"text\":\"document {} {}\"}}\n", i, std::string(i * 37 % 300, 'x'));
  }
  return text;
}

TEST_F(DocumentSourceTest, CompressedInputsEqualPlainOnes) {
  const std::string text = many_lines(5000);
  write("a.jsonl", text);
  const Lines plain = read({path("a.jsonl")});
  ASSERT_EQ(plain.size(), 5000u);
  EXPECT_EQ(plain[4999], "document 4999 " + std::string(4999 * 37 % 300, 'x'));
  write("a.jsonl.zst", zstd(text));
  EXPECT_EQ(read({path("a.jsonl.zst")}), plain);
  write("a.jsonl.gz", gzip(text));
  EXPECT_EQ(read({path("a.jsonl.gz")}), plain);
  // Files put behind each other are one stream, cut anywhere.
  const size_t half = text.size() / 2 + 5;
  write("two.jsonl.gz", gzip(text.substr(0, half)) + gzip(text.substr(half)));
  EXPECT_EQ(read({path("two.jsonl.gz")}), plain);
  write("two.jsonl.zst", zstd(text.substr(0, half)) + zstd(text.substr(half)));
  EXPECT_EQ(read({path("two.jsonl.zst")}), plain);
  write("t.txt.gz", gzip("plain text"));
  EXPECT_EQ(read({path("t.txt.gz")}), Lines{"plain text"});
  // Any block size gives the same documents.
  for (const int64_t block : {1, 7, 100, 4096}) {
    EXPECT_EQ(read({path("a.jsonl.zst")}, {.block_bytes = block}), plain) << block;
    EXPECT_EQ(read({path("a.jsonl")}, {.block_bytes = block}), plain) << block;
  }
}

TEST_F(DocumentSourceTest, TruncatedAndCorruptFilesKeepWhatPrecedes) {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += fmt::format("{{\"text\":\"{}\"}}\n", i * 7919 % 20011);
  for (const bool use_zstd : {true, false}) {
    const std::string whole = use_zstd ? zstd(text) : gzip(text);
    const std::string name = use_zstd ? "cut.jsonl.zst" : "cut.jsonl.gz";
    for (const size_t size : {size_t{0}, size_t{3}, whole.size() / 2, whole.size() - 1}) {
      write(name, whole.substr(0, size));
      const Lines lines = read({path(name)});
      ASSERT_FALSE(lines.empty());
      const size_t good = lines.size() - 1;
      EXPECT_EQ(lines.back(), fmt::format("<{}:{} damaged file>", name, good + 1)) << size;
      for (size_t i = 0; i < good; ++i) ASSERT_EQ(lines[i], std::to_string(i * 7919 % 20011));
      // Then only its checksum is cut.
      if (size == whole.size() - 1 && !use_zstd) {
        EXPECT_EQ(good, 20000u);
      }
    }
    std::string corrupt = whole;
    for (size_t i = 0; i < 64; ++i) corrupt[whole.size() / 2 + i] ^= 0x55;
    write(name, corrupt);
    expect_contains(read({path(name)}).back(), {"damaged file"});
    write(name, "this is no compressed file");
    EXPECT_EQ(read({path(name)}), Lines{fmt::format("<{}:1 damaged file>", name)});
    write(use_zstd ? "cut.txt.zst" : "cut.txt.gz", whole.substr(0, whole.size() / 2));
    const Lines document = read({path(use_zstd ? "cut.txt.zst" : "cut.txt.gz")});
    ASSERT_EQ(document.size(), 1u);  // half a document is none
    expect_contains(document[0], {"damaged file"});
  }
}

TEST_F(DocumentSourceTest, AnEndlessLineCostsNoMemory) {
  const DocumentSource::Limits limits{.block_bytes = 4096, .document_bytes = 20000};
  std::string text = "{\"text\":\"first\"}\n{\"text\":\"" + std::string(50000000, 'x') +
                     "\"}\n{\"text\":\"third\"}\n{\"text\":\"" + std::string(15000, 'y') + "\"}\nbad\n";
  write("long.jsonl.zst", zstd(text));
  EXPECT_EQ(read({path("long.jsonl.zst")}, limits), (Lines{"first", "<long.jsonl.zst:2 too long>", "third",
                                                           std::string(15000, 'y'), "<long.jsonl.zst:5 not JSON>"}));
  EXPECT_LT(largest_block_, 100000u);
  // Nor does one without an end, or a huge text file.
  write("end.jsonl.zst", zstd("{\"text\":\"first\"}\n" + std::string(30000000, 'x')));
  EXPECT_EQ(read({path("end.jsonl.zst")}, limits), (Lines{"first", "<end.jsonl.zst:2 too long>"}));
  write("huge.txt.gz", gzip(std::string(30000000, 'x')));
  DocumentSource source({path("huge.txt.gz")}, limits);
  InputBlock block;
  ASSERT_TRUE(source.next(block));
  EXPECT_EQ(block.fault->fault, input_fault::kTooLong);
  EXPECT_FALSE(source.next(block));
  EXPECT_LT(largest_block_, 100000u);
}

TEST_F(DocumentSourceTest, PipesSocketsAndDevicesAreRefusedByName) {
  write("ok.txt", "ok");
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  for (const std::string& odd : {path("pipe"), std::string("/dev/zero")}) {
    const ErrorReport report = error_of([&] { DocumentSource({odd}, {}); });
    EXPECT_EQ(report.code, ExitCode::kUsage);
    expect_contains(report.what, {odd, "pipe"});
  }
  EXPECT_EQ(read({folder_}), Lines{"ok"});
}

TEST_F(DocumentSourceTest, AFileThatCannotBeReadIsAFault) {
  const std::string link = path("loop.txt");
  std::filesystem::create_symlink(link, link);
  write("ok.txt", "ok");
  EXPECT_EQ(read({folder_}), Lines{"ok"});  // within a folder a link to nowhere is no file
}

}  // namespace
}  // namespace marrow
