// A tokenizer.json small enough to vary in a test.
#pragma once
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace marrow {

// A folder of its own, removed at the end of the test.
class TokenizerFolder {
 public:
  TokenizerFolder() {
    char name[] = "/tmp/marrow-tokenizer-XXXXXX";
    path_ = mkdtemp(name);
  }
  ~TokenizerFolder() { std::filesystem::remove_all(path_); }
  TokenizerFolder(const TokenizerFolder&) = delete;
  TokenizerFolder& operator=(const TokenizerFolder&) = delete;
  const std::string& path() const { return path_; }
  void write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ + "/" + name, std::ios::binary) << content;
  }

 private:
  std::string path_;
};

// The sections of a tokenizer.json. Bytes have the ids 0 to 255, " th", "th", "the", "aa" and
// "aaaa" follow; <|end|> is special, <tool> is not.
struct TinyTokenizer {
  std::string before = R"("version": "1.0", "truncation": null, "padding": null)";
  std::string added =
      R"([{"id": 261, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": true},
          {"id": 262, "content": "<tool>", "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": false}])";
  std::string normalizer = "null";
  std::string pretokenizer =
      R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})";
  std::string post_processor = "null";
  std::string decoder = R"({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})";
  std::string model_flags =
      R"("type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
         "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false)";
  std::string vocab = byte_entries() + R"(, "th": 256, "the": 257, "Ġthe": 258, "aa": 259,
                                          "aaaa": 260)";
  std::string merges = R"(["t h", "th e", ["Ġ", "the"], "a a", "aa aa"])";

  static std::string byte_entries() {
    std::string out;
    int other = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
      out += fmt::format("{}\"\\u{:04x}\": {}", byte == 0 ? "" : ", ", printable ? byte : other++, byte);
    }
    return out;
  }

  std::string json() const {
    return "{" + before + ", \"added_tokens\": " + added + ", \"normalizer\": " + normalizer +
           ", \"pre_tokenizer\": " + pretokenizer + ", \"post_processor\": " + post_processor +
           ", \"decoder\": " + decoder + ", \"model\": {" + model_flags + ", \"vocab\": {" + vocab +
           "}, \"merges\": " + merges + "}}";
  }
};

}  // namespace marrow
