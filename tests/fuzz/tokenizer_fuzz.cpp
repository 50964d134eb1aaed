// tokenizer.json ($BYTES: the 256 entries of bytes) and tokenizer_config.json, behind a text to encode.
#include <algorithm>

#include "data/tokenizer.h"
#include "data/tokenizer_json.h"
#include "data/unicode_text.h"
#include "fuzz/fuzz_target.h"

namespace marrow {
namespace {

using namespace fuzz;  // NOLINT

std::string byte_entries() {
  const Json file = Json::parse(bytes_tokenizer_files()[0].text, "bytes");
  const std::string vocab = file.at("model").at("vocab").dump();
  return vocab.substr(1, vocab.size() - 2);
}

// Whether ids are the text's bytes, in pieces: nothing normalizes, removes, or stands for other text than its own.
bool keeps_bytes(const TokenizerSpec& spec) {
  const auto keeps = [](const SplitStage& stage) { return stage.keep_matches && stage.keep_rest; };
  return !spec.nfc && spec.added_tokens.empty() && std::ranges::all_of(spec.stages, keeps);
}

void encode_and_decode(const Tokenizer& tokenizer, const std::string& text, bool keeps_bytes) {
  std::vector<int32_t> ids, again;
  tokenizer.encode(text, ids);
  tokenizer.encode(text, again);
  require(ids == again, "a text has the same ids each time");
  for (const int32_t id : ids) require(id >= 0 && id < tokenizer.vocab_size(), "ids are those of the vocabulary");
  const std::string decoded = tokenizer.decode(ids);
  require(!keeps_bytes || decoded == text, "decoding gives the text");
}

void read(const std::vector<std::string>& parts) {
  static const ScratchFolder folder;
  static const std::string bytes = byte_entries();
  const std::string json = replaced(parts[1], "$BYTES", bytes);
  const std::string path = folder.write("tokenizer.json", json);
  folder.write("tokenizer_config.json", parts[2].empty() ? "{}" : parts[2]);
  for (const bool special : {false, true}) {
    accepts([&] {
      const auto tokenizer = open_tokenizer(folder.path(), {.special_tokens = special});
      const bool keeps = tokenizer->hash() == "bytes" || keeps_bytes(read_tokenizer_json(json, path));
      accepts([&] { encode_and_decode(*tokenizer, parts[0], keeps); });
    });
  }
}

}  // namespace
}  // namespace marrow

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  marrow::read(marrow::fuzz::parts_of(marrow::fuzz::text_of(data, size), 3));
  return 0;
}
