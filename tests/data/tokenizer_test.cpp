#include "data/tokenizer.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <ctime>
#include <random>
#include <thread>

#include "data/unicode_text.h"
#include "tokenizer_testing.h"

namespace marrow {
namespace {

using Ids = std::vector<int32_t>;

Ids encode(const Tokenizer& tokenizer, std::string_view text) {
  Ids ids;
  tokenizer.encode(text, ids);
  return ids;
}

std::unique_ptr<Tokenizer> open_tiny(const TinyTokenizer& tiny, TokenizerOptions options = {}) {
  const TokenizerFolder folder;
  folder.write("tokenizer.json", tiny.json());
  return open_tokenizer(folder.path(), options);
}

Ids bytes_of(std::string_view text) {
  Ids ids;
  for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
  return ids;
}

TEST(ByteTokenizer, IdsAreBytes) {
  const auto tokenizer = open_tokenizer("bytes");
  EXPECT_EQ(encode(*tokenizer, std::string_view("a\0\xff", 3)), (Ids{97, 0, 255}));
  EXPECT_EQ(tokenizer->decode(Ids{97, 0, 255, 256, 257}), std::string("a\0\xff\xef\xbf\xbd", 6));
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->end_of_document(), 256);
  EXPECT_EQ(tokenizer->name(), "bytes");
  EXPECT_EQ(tokenizer->hash(), "bytes");
  Ids ids = {7};
  tokenizer->encode("b", ids);
  EXPECT_EQ(ids, (Ids{7, 98}));  // appends
  TokenizerOptions options;
  options.end_of_document = 0;
  EXPECT_THROW(open_tokenizer("bytes", options), Error);
}

TEST(ByteTokenizer, ItsOwnFilesAreItAgain) {
  const TokenizerFolder folder;
  EXPECT_EQ(tokenizer_hash(folder.path()), "");
  for (const SideFile& file : bytes_tokenizer_files()) folder.write(file.name, file.text);
  EXPECT_EQ(open_tokenizer(folder.path())->name(), "bytes");
  EXPECT_EQ(tokenizer_hash(folder.path()), "bytes");
  folder.write("tokenizer.json", bytes_tokenizer_files()[0].text + " ");  // read like any other, and gives the same
  const auto read = open_tokenizer(folder.path());
  EXPECT_EQ(tokenizer_hash(folder.path()), read->hash());
  EXPECT_EQ(read->hash().size(), 64u);
  EXPECT_EQ(encode(*read, "aé\n"), encode(*open_tokenizer("bytes"), "aé\n"));
  EXPECT_EQ(read->end_of_document(), 256);
}

TEST(BpeTokenizer, MergesByRank) {
  const auto tokenizer = open_tiny({});
  EXPECT_EQ(encode(*tokenizer, "the the"), (Ids{257, 258}));
  EXPECT_EQ(encode(*tokenizer, "aaaaaaa"), (Ids{260, 259, 97}));
  EXPECT_EQ(encode(*tokenizer, ""), Ids{});
  EXPECT_EQ(tokenizer->vocab_size(), 263);
  EXPECT_EQ(tokenizer->decode(Ids{257, 258, 261, 262}), "the the<|end|><tool>");
  EXPECT_EQ(tokenizer->decode(Ids{97, 263, -1}), "a\xef\xbf\xbd\xef\xbf\xbd");
}

TEST(BpeTokenizer, LongAndShortWordsMergeAlike) {
  const auto tokenizer = open_tiny({});
  for (size_t count = 1; count < 300; ++count) {  // across the word cache's and the heap's limits
    Ids expected(count / 4, 260);
    if (count % 4 >= 2) expected.push_back(259);
    if (count % 2 == 1) expected.push_back(97);
    ASSERT_EQ(encode(*tokenizer, std::string(count, 'a')), expected) << count;
    ASSERT_EQ(encode(*tokenizer, std::string(count, 'a')), expected) << count << ", cached";
  }
}

TEST(BpeTokenizer, IgnoreMergesTakesWholeWords) {
  TinyTokenizer tiny;
  tiny.merges = R"(["t h", "a a", "aa aa"])";
  EXPECT_EQ(encode(*open_tiny(tiny), "the"), (Ids{256, 101}));
  tiny.model_flags += R"(, "ignore_merges": true)";
  EXPECT_EQ(encode(*open_tiny(tiny), "the the"), (Ids{257, 258}));
}

// T2: the text of a special token is text, unless asked for otherwise.
TEST(BpeTokenizer, SpecialTokensAreTextByDefault) {
  EXPECT_EQ(encode(*open_tiny({}), "a<|end|>"), bytes_of("a<|end|>"));
  EXPECT_EQ(encode(*open_tiny({}), "a<tool>b"), (Ids{97, 262, 98}));
  TokenizerOptions options;
  options.special_tokens = true;
  EXPECT_EQ(encode(*open_tiny({}, options), "a<|end|>b<|end"), (Ids{97, 261, 98, '<', '|', 'e', 'n', 'd'}));
}

// T2: NUL, byte order mark, CRLF and surrogate pairs' characters are text like any other.
TEST(BpeTokenizer, OddTextComesBack) {
  const auto tokenizer = open_tiny({});
  for (const std::string_view text :
       {std::string_view("\0", 1), std::string_view("\xef\xbb\xbfx"), std::string_view("a\r\nb\r\n"),
        std::string_view("\xf0\x9f\x98\x80"), std::string_view("\u0085\u2028 \u3000")}) {
    EXPECT_EQ(tokenizer->decode(encode(*tokenizer, text)), text);
  }
}

TEST(BpeTokenizer, RandomTextComesBack) {
  std::mt19937 random(5);
  TokenizerOptions options;
  options.special_tokens = true;
  const auto plain = open_tiny({}), special = open_tiny({}, options);
  const std::string_view pieces[] = {"the", " the", "aaa",    "<|end|>", "<tool",      ">",      "\n", "  ",
                                     "é",   "漢字", "\u0301", "😀",       "\U00011de3", "\u0897", "'s"};
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    while (random() % 12 != 0) text += pieces[random() % std::size(pieces)];
    ASSERT_EQ(plain->decode(encode(*plain, text)), text);
    ASSERT_EQ(special->decode(encode(*special, text)), text);
  }
}

TEST(BpeTokenizer, InvalidUtf8NamesTheOffset) {
  const auto tokenizer = open_tiny({});
  for (const std::string_view bad :
       {"\xff", "\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\x80"}) {
    Ids ids;
    try {
      tokenizer->encode("0123456789" + std::string(bad), ids);
      ADD_FAILURE() << testing::PrintToString(bad) << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("offset 10 of"), std::string::npos) << error.what();
      EXPECT_EQ(error.report().code, ExitCode::kBadInput);
    }
  }
}

TEST(BpeTokenizer, ThreadsShareOneTokenizer) {
  const auto tokenizer = open_tiny({});
  std::string text;
  for (int i = 0; i < 5000; ++i) text += fmt::format("the {} theaaa\n", i * 7919);
  const Ids expected = encode(*tokenizer, text);
  std::vector<std::thread> threads;
  std::vector<int> equal(4, 0);
  for (size_t i = 0; i < equal.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int j = 0; j < 5; ++j) equal[i] += encode(*tokenizer, text) == expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(equal, std::vector<int>(4, 5));
}

// T1: ids that need more than 16 bits.
TEST(BpeTokenizer, WideIds) {
  TinyTokenizer tiny;
  tiny.vocab += R"(, "thth": 65535, "ĠĠ": 65536)";
  tiny.merges = R"(["t h", "th th", "Ġ Ġ"])";
  tiny.added = "[]";
  const auto tokenizer = open_tiny(tiny);
  EXPECT_EQ(encode(*tokenizer, "thth"), Ids{65535});
  EXPECT_EQ(encode(*tokenizer, "  "), Ids{65536});
  EXPECT_EQ(tokenizer->vocab_size(), 65537);
  EXPECT_EQ(tokenizer->decode(Ids{65535, 65536, 300}), "thth  \xef\xbf\xbd");
}

TEST(BpeTokenizer, EndOfDocument) {
  const TokenizerFolder folder;
  folder.write("tokenizer.json", TinyTokenizer().json());
  const std::string path = folder.path() + "/tokenizer.json";
  EXPECT_EQ(open_tokenizer(path)->end_of_document(), std::nullopt);
  folder.write("tokenizer_config.json", R"({"eos_token": "<|end|>"})");
  EXPECT_EQ(open_tokenizer(path)->end_of_document(), 261);
  EXPECT_EQ(open_tokenizer(folder.path())->end_of_document(), 261);
  folder.write("tokenizer_config.json", R"({"eos_token": {"content": "the", "special": true}})");
  EXPECT_EQ(open_tokenizer(path)->end_of_document(), 257);
  folder.write("tokenizer_config.json", R"({"eos_token": null})");
  EXPECT_EQ(open_tokenizer(path)->end_of_document(), std::nullopt);
  TokenizerOptions options;
  options.end_of_document = 3;
  EXPECT_EQ(open_tokenizer(path, options)->end_of_document(), 3);
  options.end_of_document = 263;
  EXPECT_THROW(open_tokenizer(path, options), Error);
  folder.write("tokenizer_config.json", R"({"eos_token": "<|stop|>"})");
  EXPECT_THROW(open_tokenizer(path), Error);
}

TEST(BpeTokenizer, HashIsTheFilesSha256) {
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex(std::string(200, 'x')), "aa20c23e3201834050679e1d88941b9a6fed0557c9a705cb2c315e2e63fd486d");
  TinyTokenizer tiny;
  const auto one = open_tiny(tiny), same = open_tiny(tiny);
  tiny.before += " ";
  EXPECT_EQ(one->hash(), sha256_hex(TinyTokenizer().json()));
  EXPECT_EQ(one->hash(), same->hash());
  EXPECT_NE(one->hash(), open_tiny(tiny)->hash());
}

TEST(UnicodeText, NormalizesWhatTheReferenceDoes) {
  const std::pair<std::string, std::string> cases[] = {{"e\u0301", "é"},
                                                       {"\u1100\u1161\u11a8x", "각x"},
                                                       {"가\u11a8", "각"},
                                                       {"\u1103\u1172\u11a7", "듀\u11a7"},  // no final consonant
                                                       {"\u212b", "Å"},
                                                       {"q\u0301\u0316", "q\u0316\u0301"},
                                                       {"\u0958", "\u0915\u093c"},
                                                       {"か\u3099", "が"},
                                                       {"\u09c7\u09be", "\u09cb"},
                                                       {"漢e\u0301字", "漢é字"},
                                                       {"\u0301a", "\u0301a"},
                                                       {"", ""},
                                                       // Unicode 13 composes these and Unicode 14 gives U+0898 a class;
                                                       // the reference's tables are older.
                                                       {"\U00011935\U00011930", "\U00011935\U00011930"},
                                                       {"q\u0898\u0334", "q\u0898\u0334"}};
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(to_nfc(text), expected) << testing::PrintToString(text);
  }
}

double seconds_for(const Tokenizer& tokenizer, const std::string& text) {
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const std::clock_t start = std::clock();
    encode(tokenizer, text);
    best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  return best;
}

// T3: quadratic merging would take 64 times as long for 8 times the text.
TEST(BpeTokenizer, TimeIsNearLinear) {
  const auto tokenizer = open_tiny({});
  std::mt19937 random(3);
  std::string letters(size_t{1} << 20, 'a');
  for (char& c : letters) c = static_cast<char>('a' + random() % 26);
  for (const std::string& text : {std::string(size_t{1} << 20, 'a'), std::string(size_t{1} << 20, ' '), letters}) {
    const double whole = seconds_for(*tokenizer, text);
    const double eighth = seconds_for(*tokenizer, text.substr(0, text.size() / 8));
    EXPECT_LT(whole, 8 * 2.5 * eighth + 0.01) << text.substr(0, 5);
    EXPECT_LT(whole, 2.0) << text.substr(0, 5);
  }
}

// One match over a whole text is no runaway; one that tries each way to cut it in pieces is an error at once.
TEST(BpeTokenizer, RunawayMatchesEnd) {
  TinyTokenizer tiny;
  const auto open = [&](const std::string& pattern) {
    tiny.pretokenizer = R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Isolated", "pattern":
        {"Regex": ")" + pattern +
                        R"("}}, {"type": "ByteLevel", "use_regex": false}]})";
    return open_tiny(tiny);
  };
  const auto words = open(R"(\\p{L}+|\\s+(?!\\S)|(?:[0-9]|[a-z])+?(?=\\s)|\\s+)");
  EXPECT_FALSE(encode(*words, std::string(12'000'000, ' ') + 'a').empty());
  EXPECT_FALSE(encode(*words, std::string(2'000'000, '1') + " ").empty());
  try {
    encode(*open("(?:a+)+[0-9]"), std::string(60, 'a'));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.report().code, ExitCode::kBadInput);
    EXPECT_NE(error.report().what.find("60 bytes"), std::string::npos) << error.report().what;
  }
}

// T3: a document of 100 MB; the ids are those of its parts, and next to them little is needed.
TEST(BpeTokenizer, HugeDocumentInBoundedMemory) {
  TinyTokenizer tiny;
  tiny.normalizer = R"({"type": "NFC"})";
  const auto tokenizer = open_tiny(tiny);
  const std::string unit = "the theaaaa, the théaa 漢字 12 aaaa";  // no piece crosses its ends
  const Ids unit_ids = encode(*tokenizer, " " + unit);
  std::string text;
  const size_t units = 100'000'000 / (unit.size() + 1);
  text.reserve(units * (unit.size() + 1));
  for (size_t i = 0; i < units; ++i) text.append(" ").append(unit);
  Ids ids(units * unit_ids.size());  // touched, so that only the rest counts
  ids.clear();
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  tokenizer->encode(text, ids);
  getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 250 << 10);  // KiB: the normalized text and a cache
  ASSERT_EQ(ids.size(), units * unit_ids.size());
  for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(ids[i], unit_ids[i % unit_ids.size()]) << i;
}

}  // namespace
}  // namespace marrow
