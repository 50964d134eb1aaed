// Token for token against Python's tokenizers 0.23.2. MARROW_ORACLE_MB sets the size of the text
// (default 4, half a minute of one
// core; 24 takes two minutes).
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <random>

#include "base/files.h"
#include "data/tokenizer.h"

namespace marrow {
namespace {

namespace fs = std::filesystem;

// Reads what tokenizer_oracle.py wrote: u32 values and the bytes or ids that they count.
class Reader {
 public:
  explicit Reader(const std::string& path) : file_(path) {}
  uint32_t number() {
    uint32_t value;
    std::memcpy(&value, take(4), 4);
    return value;
  }
  std::string_view text() {
    const uint32_t size = number();
    return {reinterpret_cast<const char*>(take(size)), size};
  }
  std::vector<int32_t> ids() {
    std::vector<int32_t> ids(number());
    if (!ids.empty()) std::memcpy(ids.data(), take(ids.size() * 4), ids.size() * 4);
    return ids;
  }

 private:
  const std::byte* take(size_t size) {
    MARROW_CHECK(at_ + size <= file_.bytes().size(), ExitCode::kBadInput, Fix("run the oracle again"), "{} ends early",
                 file_.path());
    at_ += size;
    return file_.bytes().data() + at_ - size;
  }
  MappedFile file_;
  size_t at_ = 0;
};

class TokenizerOracle : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    char name[] = "/tmp/marrow-tokenizer-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder() = name;
    const char* megabytes = std::getenv("MARROW_ORACLE_MB");
    const std::string root = MARROW_SOURCE_DIR;
    const std::string command = root + "/.venv/bin/python " + root + "/tests/oracle/tokenizer_oracle.py " + folder() +
                                " " + (megabytes == nullptr ? "4" : megabytes);
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  static void TearDownTestSuite() { fs::remove_all(folder()); }
  static std::string& folder() {
    static std::string path;
    return path;
  }

  // Compares all texts of FILE; at most a few differences are printed.
  static size_t compare(const std::string& name, const std::string& file, bool special_tokens) {
    const std::string base = folder() + "/" + name;
    TokenizerOptions options;
    options.special_tokens = special_tokens;
    const auto tokenizer = open_tokenizer(base, options);
    Reader texts(folder() + "/texts.bin"), expected(base + "/" + file);
    texts.number();
    const uint32_t count = expected.number();
    size_t differing = 0, tokens = 0;
    std::vector<int32_t> ids;
    for (uint32_t i = 0; i < count; ++i) {
      const std::string_view text = texts.text();
      ids.clear();
      tokenizer->encode(text, ids);
      tokens += ids.size();
      if (const auto wanted = expected.ids(); ids != wanted && ++differing <= 3) {
        const auto [ours, theirs] = std::mismatch(ids.begin(), ids.end(), wanted.begin(), wanted.end());
        const auto at = static_cast<size_t>(ours - ids.begin());
        const std::string before = tokenizer->decode(std::span(ids).first(at));
        ADD_FAILURE() << name << " " << file << ", text " << i << ", token " << at << " of " << wanted.size() << ": "
                      << (ours == ids.end() ? -1 : *ours) << " instead of " << (theirs == wanted.end() ? -1 : *theirs)
                      << ", after "
                      << testing::PrintToString(before.substr(before.size() - std::min<size_t>(before.size(), 60)))
                      << " in "
                      << testing::PrintToString(text.substr(
                             std::min(text.size(), before.size() - std::min<size_t>(before.size(), 9)), 80));
      }
    }
    EXPECT_EQ(differing, 0U) << name << " " << file << ": of " << count << " texts";
    return tokens;
  }
};

TEST_F(TokenizerOracle, EqualsTheReferenceInEveryText) {
  size_t tokens = 0;
  size_t tokenizers = 0;
  for (const auto& entry : fs::directory_iterator(folder())) {
    if (!entry.is_directory()) continue;
    const std::string name = entry.path().filename();
    tokens += compare(name, "ids.bin", false);
    tokens += compare(name, "special.bin", true);
    ++tokenizers;
  }
  EXPECT_EQ(tokenizers, 11U);
  EXPECT_GT(tokens, 4'000'000U);
}

// T3: quadratic work would take 64 times as long for 8 times the text.
TEST_F(TokenizerOracle, TimeIsNearLinear) {
  std::mt19937 random(3);
  std::string letters(size_t{1} << 20, 'a');
  for (char& c : letters) c = static_cast<char>('a' + random() % 26);
  const std::string spaces(letters.size(), ' ');
  for (const std::string name : {"deepseek", "qwen", "o200k"}) {
    const auto tokenizer = open_tokenizer(folder() + "/" + name);
    const auto seconds = [&](const std::string& text) {
      double best = 1e9;
      for (int i = 0; i < 2; ++i) {
        std::vector<int32_t> ids;
        const std::clock_t start = std::clock();
        tokenizer->encode(text, ids);
        best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
      }
      return best;
    };
    for (const std::string& text :
         {std::string(letters.size(), 'a'), spaces, letters, std::string(letters.size(), '\n'), spaces + "a"}) {
      const double whole = seconds(text), eighth = seconds(text.substr(0, text.size() / 8));
      EXPECT_LT(whole, 8 * 2.5 * eighth + 0.01) << name << " " << text.substr(0, 5);
      EXPECT_LT(whole, 3.0) << name << " " << text.substr(0, 5);
    }
  }
}

}  // namespace
}  // namespace marrow
