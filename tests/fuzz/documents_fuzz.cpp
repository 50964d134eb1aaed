// Text, JSON lines, gzip and zstd: the first byte says which, the rest is the file. The documents do not depend on the
// size of the blocks in which they are read.
#include <algorithm>
#include <array>

#include "data/document_source.h"
#include "data/unicode_text.h"
#include "fuzz/fuzz_target.h"

namespace marrow {
namespace {

using namespace fuzz;  // NOLINT

// Each document, or its fault and line. `bytes` counts those of all blocks.
std::vector<std::string> documents_of(const std::string& path, int64_t block_bytes, size_t& bytes) {
  DocumentSource source({path}, {.block_bytes = block_bytes, .document_bytes = int64_t{16} << 20});
  std::vector<std::string> documents;
  for (InputBlock block; source.next(block);) {
    bytes += block.text.size();
    read_documents(block, "text", [&](const Document& document) {
      require(valid_utf8_length(document.text) == document.text.size(), "a document is UTF-8");
      require(document.fault.has_value() == document.text.empty(), "a document is a text or a fault");
      documents.push_back(document.fault ? fmt::format("{} in line {}", document.fault->fault, document.fault->line)
                                         : ": " + std::string(document.text));
    });
  }
  require(source.disk_bytes_read() >= 0 && source.disk_bytes_read() <= source.disk_bytes(),
          "bytes read are the file's");
  return documents;
}

// What the other reader of JSON makes of a line, where it takes it.
void compare_with_json(std::string_view line) {
  RegexScratch scratch;
  const JsonField field = find_json_string(line, "text", scratch);
  if (field.fault == input_fault::kNotJson) return;
  accepts([&] {
    const Json json = Json::parse(line, "the line");
    const bool has = json.has("text") && json.at("text").is_string();
    require(has == (field.fault != input_fault::kMissingField), "both readers find the field");
    require(!has || !field.fault.empty() || json.at("text").as_string() == field.text, "both readers give one text");
  });
}

// Of a damaged file, how much of what precedes the damage is still read does depend on the blocks.
void require_same(std::vector<std::string> a, std::vector<std::string> b) {
  const auto damaged = [](const auto& list) {
    return !list.empty() && list.back().starts_with(input_fault::kDamagedFile);
  };
  require(damaged(a) == damaged(b), "damage does not depend on blocks");
  if (damaged(a)) {
    const size_t common = std::min(a.size(), b.size()) - 1;
    a.resize(common);
    b.resize(common);
  }
  require(a == b, "documents do not depend on blocks");
}

void read(std::string_view input) {
  static const ScratchFolder folder;
  constexpr std::array kNames{"f.txt", "f.jsonl", "f.txt.gz", "f.jsonl.gz", "f.txt.zst", "f.jsonl.zst"};
  const size_t kind = static_cast<uint8_t>(input.front()) % kNames.size();
  input.remove_prefix(1);
  const std::string path = folder.write(kNames[kind], input);
  size_t bytes = 0;
  const auto documents = documents_of(path, 1 << 14, bytes);
  if (bytes < 1 << 16) require_same(documents, documents_of(path, 7, bytes));
  if (kind == 1) compare_with_json(input.substr(0, input.find('\n')));
}

}  // namespace
}  // namespace marrow

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) marrow::fuzz::accepts([&] { marrow::read(marrow::fuzz::text_of(data, size)); });
  return 0;
}
