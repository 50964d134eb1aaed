#include "data/tokenizer.h"

#include <filesystem>

#include "base/error.h"
#include "base/files.h"
#include "data/bpe_tokenizer.h"
#include "data/sha256.h"
#include "data/tokenizer_json.h"

namespace marrow {
namespace {

constexpr int32_t kBytesEndOfDocument = 256;

class ByteTokenizer final : public Tokenizer {
 public:
  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    const size_t before = ids.size();
    ids.resize(before + text.size());
    for (size_t i = 0; i < text.size(); ++i) ids[before + i] = static_cast<uint8_t>(text[i]);
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id >= 0 && id < kBytesEndOfDocument) {
        text.push_back(static_cast<char>(id));
      } else if (id != kBytesEndOfDocument) {
        text += "\xef\xbf\xbd";
      }
    }
    return text;
  }
  int64_t vocab_size() const override { return kBytesEndOfDocument + 1; }
  std::optional<int32_t> end_of_document() const override { return kBytesEndOfDocument; }
  const std::string& name() const override { return name_; }
  const std::string& hash() const override { return hash_; }

 private:
  std::string name_ = "bytes", hash_ = "bytes";
};

}  // namespace

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name_or_path,
                                          const TokenizerOptions& options) {
  if (name_or_path == "bytes") {
    MARROW_CHECK(options.end_of_document.value_or(kBytesEndOfDocument) == kBytesEndOfDocument,
                 ExitCode::kUsage, Fix("leave out --eod-id"),
                 "end-of-document id {} with the tokenizer bytes, which has {}",
                 *options.end_of_document, kBytesEndOfDocument);
    return std::make_unique<ByteTokenizer>();
  }
  namespace fs = std::filesystem;
  MARROW_CHECK(fs::exists(name_or_path), ExitCode::kUsage,
               Fix("give \"bytes\", a tokenizer.json or a folder that holds one"),
               "tokenizer {}: no such file or folder", json_quote(name_or_path));
  const bool is_folder = fs::is_directory(name_or_path);
  const std::string path =
      is_folder ? (fs::path(name_or_path) / "tokenizer.json").string() : name_or_path;
  MARROW_CHECK(fs::exists(path), ExitCode::kUsage,
               Fix("convert the tokenizer to tokenizer.json, as AutoTokenizer.save_pretrained "
                   "writes it"),
               "the folder {} holds no tokenizer.json", json_quote(name_or_path));
  const std::string text = read_text_file(path);
  return make_bpe_tokenizer(read_tokenizer_json(text, path), path, sha256_hex(text), options);
}

}  // namespace marrow
