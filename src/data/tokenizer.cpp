#include "data/tokenizer.h"

#include <filesystem>
#include <map>
#include <mutex>
#include <set>

#include "base/files.h"
#include "data/bpe_merger.h"
#include "data/sha256.h"
#include "data/unicode_text.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr const char* kReplacementCharacter = "\xef\xbf\xbd";
constexpr int32_t kBytesEndOfDocument = 256;

class ByteTokenizer final : public Tokenizer {
 public:
  ByteTokenizer() : Tokenizer("bytes", "bytes", kBytesEndOfDocument + 1, kBytesEndOfDocument) {}
  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(text.data());
    ids.insert(ids.end(), bytes, bytes + text.size());
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id >= 0 && id < kBytesEndOfDocument) {
        text.push_back(static_cast<char>(id));
      } else if (id != kBytesEndOfDocument) {
        text += kReplacementCharacter;
      }
    }
    return text;
  }
};

// Finds added tokens in text: leftmost, and of those the longest.
class AddedTokens {
 public:
  void add(const AddedToken& token) {
    sizes_.insert(token.content.size());
    starts_[static_cast<uint8_t>(token.content[0])] = true;
    tokens_.emplace(token.content, token);
  }

  // Calls plain(std::string_view) and token(id) for the parts of `text` in order. Special tokens are found like others,
  // so that nothing is found inside of them, but unless `special_tokens` they are then passed over as plain text.
  template <class Plain, class Token>
  void split(std::string_view text, bool special_tokens, Plain&& plain, Token&& token) const {
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const AddedToken* found = starts_[static_cast<uint8_t>(text[at])] ? find(text.substr(at)) : nullptr;
      const size_t begin = at;
      at += found == nullptr ? 1 : found->content.size();
      if (found == nullptr || (found->special && !special_tokens)) continue;
      if (done < begin) plain(text.substr(done, begin - done));
      token(found->id);
      done = at;
    }
    if (done < text.size()) plain(text.substr(done));
  }

 private:
  // The longest token that `text` begins with.
  const AddedToken* find(std::string_view text) const {
    for (const size_t size : sizes_) {
      const auto found = size > text.size() ? tokens_.end() : tokens_.find(text.substr(0, size));
      if (found != tokens_.end()) return &found->second;
    }
    return nullptr;
  }

  std::map<std::string, AddedToken, std::less<>> tokens_;  // by content
  std::set<size_t, std::greater<>> sizes_;                 // of the contents
  std::array<bool, 256> starts_{};                         // does one start with this byte?
};

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(TokenizerSpec spec, const std::string& path, const std::string& hash, const TokenizerOptions& options)
      : Tokenizer(path, hash, static_cast<int64_t>(spec.texts.size()), options.end_of_document),
        special_tokens_(options.special_tokens),
        nfc_(spec.nfc),
        texts_(std::move(spec.texts)),
        stages_(std::move(spec.stages)),
        merger_(spec) {
    for (AddedToken token : spec.added_tokens) {
      if (token.normalized && nfc_) token.content = to_nfc(token.content);
      (token.normalized ? normalized_tokens_ : raw_tokens_).add(token);
    }
    if (!end_of_document_) end_of_document_ = read_end_of_document(spec, path);
    MARROW_CHECK(!end_of_document_ || (*end_of_document_ >= 0 && *end_of_document_ < vocab_size_), ExitCode::kUsage,
                 Fix("give --eod-id an id of this tokenizer"),
                 "{}: end-of-document id {} is outside of the vocabulary of {} ids", path, *end_of_document_,
                 vocab_size_);
  }

  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    const size_t valid = valid_utf8_length(text);
    MARROW_CHECK(valid == text.size(), ExitCode::kBadInput, Fix("repair the text, or tokenize with --on-error skip"),
                 "text for {} is not valid UTF-8: byte {:#04x} at offset {} of {}", name_,
                 static_cast<uint8_t>(text[valid]), valid, text.size());
    auto scratch = borrow();
    const auto push = [&](int32_t id) { ids.push_back(id); };
    const auto encode_normal = [&](std::string_view part) {
      encode_piece(0, part, class_text(part, scratch->classes), *scratch, ids);
    };
    const auto normalize = [&](std::string_view part) {
      const std::string normal = nfc_ ? to_nfc(part) : "";
      normalized_tokens_.split(nfc_ ? normal : part, special_tokens_, encode_normal, push);
    };
    raw_tokens_.split(text, special_tokens_, normalize, push);
    give_back(std::move(scratch));
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      text += id >= 0 && id < vocab_size_ ? texts_[static_cast<size_t>(id)] : kReplacementCharacter;
    }
    return text;
  }

 private:
  // What one encode call at a time needs; they are lent out, so that there are as many as there
  // are threads, and each thread's word cache stays warm.
  struct Scratch {
    RegexScratch regex;
    BpeMerger::Scratch merge;
    std::string classes;
  };

  std::unique_ptr<Scratch> borrow() const {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<Scratch>();
    auto scratch = std::move(idle_.back());
    idle_.pop_back();
    return scratch;
  }

  // One that grew with a huge document is let go, so that memory does not stay taken.
  void give_back(std::unique_ptr<Scratch> scratch) const {
    const size_t grown = scratch->classes.capacity() + scratch->merge.heap.capacity() * 8;
    const std::lock_guard lock(mutex_);
    if (grown <= size_t{16} << 20) idle_.push_back(std::move(scratch));
  }

  // Applies the split stages from `stage` on to `text`, and merges the words that come out. The expressions see
  // `classes` in its place, a text of equal length.
  void encode_piece(size_t stage, std::string_view text, std::string_view classes, Scratch& scratch,
                    std::vector<int32_t>& ids) const {
    if (stage == stages_.size()) return merger_.encode(text, scratch.merge, ids);
    const auto& [regex, keep_matches, keep_rest] = stages_[stage];
    const auto keep = [&](size_t begin, size_t end) {
      encode_piece(stage + 1, text.substr(begin, end - begin), classes.substr(begin, end - begin), scratch, ids);
    };
    size_t at = 0;
    while (at < text.size() && regex.find(classes, at, scratch.regex)) {
      const size_t begin = scratch.regex.begin(), end = scratch.regex.end();
      if (keep_rest && at < begin) keep(at, begin);
      if (keep_matches) keep(begin, end);
      at = end;
    }
    if (keep_rest && at < text.size()) keep(at, text.size());
  }

  bool special_tokens_, nfc_;
  AddedTokens raw_tokens_, normalized_tokens_;
  std::vector<std::string> texts_;  // [vocab_size]
  std::vector<SplitStage> stages_;
  BpeMerger merger_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

std::string hash_of_file(const std::string& text) {
  return text == bytes_tokenizer_files()[0].text ? "bytes" : sha256_hex(text);
}

}  // namespace

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name_or_path, const TokenizerOptions& options) {
  const bool is_bytes = name_or_path == "bytes";
  const std::string path = fs::is_directory(name_or_path) ? name_or_path + "/tokenizer.json" : name_or_path;
  MARROW_CHECK(
      is_bytes || fs::exists(path), ExitCode::kUsage,
      Fix("give \"bytes\", a tokenizer.json or a folder that holds one, as AutoTokenizer.save_pretrained writes it"),
      "tokenizer {}: there is no file {}", json_quote(name_or_path), path);
  const std::string text = is_bytes ? bytes_tokenizer_files()[0].text : read_text_file(path);
  const std::string hash = hash_of_file(text);
  if (hash != "bytes") return std::make_unique<BpeTokenizer>(read_tokenizer_json(text, path), path, hash, options);
  MARROW_CHECK(options.end_of_document.value_or(kBytesEndOfDocument) == kBytesEndOfDocument, ExitCode::kUsage,
               Fix("leave out --eod-id"), "end-of-document id {} with the tokenizer bytes, which has {}",
               *options.end_of_document, kBytesEndOfDocument);
  return std::make_unique<ByteTokenizer>();
}

std::string tokenizer_hash(const std::string& folder) {
  const std::string path = folder + "/tokenizer.json";
  return fs::exists(path) ? hash_of_file(read_text_file(path)) : "";
}

}  // namespace marrow
