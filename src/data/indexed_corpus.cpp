#include "data/indexed_corpus.h"

#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>

#include "base/json.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

static_assert(std::endian::native == std::endian::little, "the corpus format is little-endian");

constexpr std::string_view kIndexMagic{"MMIDIDX\0\0", 9};

struct [[gnu::packed]] IndexHeader {
  char magic[9] = {};  // kIndexMagic
  uint64_t version = 1;
  uint8_t dtype_code = 0;
  uint64_t sequences = 0, document_indices = 0;
};
constexpr int64_t kIndexHeaderBytes = sizeof(IndexHeader);
static_assert(kIndexHeaderBytes == 9 + 8 + 1 + 8 + 8);

Fix rebuild() { return Fix("copy the corpus again, or rebuild it with marrow tokenize"); }

// Calls visit with a zero of the type that Megatron's dtype code stands for; false for the codes of no integers.
template <class Visit>
bool visit_dtype(uint8_t code, Visit&& visit) {
  if (code == 1) return visit(uint8_t{}), true;
  if (code == 2) return visit(int8_t{}), true;
  if (code == 3) return visit(int16_t{}), true;
  if (code == 4) return visit(int32_t{}), true;
  if (code == 5) return visit(int64_t{}), true;
  if (code == 8) return visit(uint16_t{}), true;
  return false;
}

template <class T>
T load(std::span<const std::byte> bytes, int64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// Byte offset of a sequence's tokens in PREFIX.bin; `index` is PREFIX.idx, with `sequences` of them.
int64_t stored_offset(std::span<const std::byte> index, int64_t sequences, int64_t sequence) {
  return load<int64_t>(index, kIndexHeaderBytes + sequences * 4 + sequence * 8);
}

// First sequence of a document.
int64_t stored_document(std::span<const std::byte> index, int64_t sequences, int64_t document) {
  return load<int64_t>(index, kIndexHeaderBytes + sequences * 12 + document * 8);
}

// Goes on from `sum`, which is 0 at first.
uint32_t crc32(uint32_t sum, std::span<const std::byte> bytes) {
  return static_cast<uint32_t>(crc32_z(sum, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace

uint8_t corpus_dtype_code(int64_t vocab_size) { return vocab_size <= 65536 ? 8 : 4; }

CorpusWriter::CorpusWriter(std::string prefix, CorpusInfo info, bool overwrite)
    : prefix_(std::move(prefix)), info_(std::move(info)), width_(corpus_dtype_code(info_.vocab_size) == 8 ? 2 : 4) {
  const fs::path folder = fs::path(prefix_).parent_path();
  MARROW_CHECK(!fs::path(prefix_).filename().empty(), ExitCode::kUsage,
               Fix("give --output a file name prefix, such as data/corpus"), "output prefix \"{}\" names no file",
               prefix_);
  std::error_code error;
  if (!folder.empty()) fs::create_directories(folder, error);
  MARROW_CHECK(!error, ExitCode::kUsage, Fix("choose another --output"), "cannot create folder {}: {}", folder.string(),
               error.message());
  for (const char* suffix : {".idx", ".bin", ".json"}) {
    MARROW_CHECK(overwrite || !fs::exists(prefix_ + suffix), ExitCode::kUsage,
                 Fix("add --overwrite to replace it, or choose another --output"), "output {}{} exists already",
                 prefix_, suffix);
  }
  lock_.emplace(temporary_path(prefix_ + ".bin"), Fix("wait for the other run, or choose another --output"));
  bin_.emplace(temporary_path(prefix_ + ".bin"));
  idx_.emplace(temporary_path(prefix_ + ".idx"));
  idx_->append(std::string(kIndexHeaderBytes, '\0'));  // finish() fills it in
}

CorpusWriter::~CorpusWriter() {
  if (!lock_) return;  // finished, or never begun
  std::remove(temporary_path(prefix_ + ".idx").c_str());
  std::remove(temporary_path(prefix_ + ".bin").c_str());
}

void CorpusWriter::append(std::span<const int32_t> ids, std::span<const int32_t> lengths) {
  const auto [lowest, highest] = ids.empty() ? std::ranges::min_max_result<int32_t>{0, 0} : std::ranges::minmax(ids);
  MARROW_CHECK(lowest >= 0 && highest < info_.vocab_size, ExitCode::kDeviceFault,
               Fix("report this tokenizer.json: its ids do not fit its vocabulary"),
               "tokenizer {} gave ids in [{}, {}], its vocabulary has {}", info_.tokenizer, lowest, highest,
               info_.vocab_size);
  const std::vector<uint16_t> narrow(ids.begin(), width_ == 2 ? ids.end() : ids.begin());
  const std::span<const std::byte> tokens = width_ == 2 ? std::as_bytes(std::span(narrow)) : std::as_bytes(ids);
  checksum_ = crc32(checksum_, tokens);
  bin_->append(tokens);
  idx_->append(std::as_bytes(lengths));
  documents_ += static_cast<int64_t>(lengths.size());
  tokens_ += static_cast<int64_t>(ids.size());
}

// Offsets and document indices follow from the lengths, which are read back from the file.
void CorpusWriter::write_index_tail() {
  const MappedFile index(temporary_path(prefix_ + ".idx"));
  const std::span<const std::byte> bytes = index.bytes();
  std::vector<int64_t> buffer;
  const auto put = [&](int64_t value, bool last = false) {
    buffer.push_back(value);
    if (buffer.size() < size_t{1} << 19 && !last) return;
    idx_->append(std::as_bytes(std::span(buffer)));
    buffer.clear();
  };
  int64_t offset = 0;
  for (int64_t i = 0; i < documents_; ++i) {
    put(offset);
    offset += load<int32_t>(bytes, kIndexHeaderBytes + i * 4) * width_;
  }
  for (int64_t i = 0; i <= documents_; ++i) put(i, i == documents_);
  IndexHeader header{.dtype_code = corpus_dtype_code(info_.vocab_size),
                     .sequences = static_cast<uint64_t>(documents_),
                     .document_indices = static_cast<uint64_t>(documents_ + 1)};
  kIndexMagic.copy(header.magic, kIndexMagic.size());
  idx_->write_at(0, std::as_bytes(std::span(&header, 1)));
}

void CorpusWriter::finish() {
  write_index_tail();
  for (auto* output : {&*bin_, &*idx_}) {
    output->sync();
    output->close();
  }
  JsonWriter json;
  json.field("tokenizer", info_.tokenizer, "tokenizer_hash", info_.tokenizer_hash, "vocab_size", info_.vocab_size);
  json.raw("end_of_document", info_.end_of_document ? json_text(*info_.end_of_document) : "null");
  json.field("documents", documents_, "tokens", tokens_, "bin_crc32", checksum_);
  // Without an index the old files are no corpus any more, so a kill in between leaves no mixture.
  std::remove((prefix_ + ".idx").c_str());
  write_text_file_atomically(prefix_ + ".json", json.text() + "\n");
  rename_temporary(prefix_ + ".bin");
  rename_temporary(prefix_ + ".idx");
  lock_.reset();
}

IndexedCorpus::IndexedCorpus(const std::string& prefix)
    : prefix_(prefix), idx_(prefix + ".idx", ExitCode::kUsage), bin_(prefix + ".bin", ExitCode::kUsage) {
  check_header();
  check_sequences();
  check_documents();
  read_info();
}

void IndexedCorpus::check_header() {
  const std::span<const std::byte> idx = idx_.bytes();
  const auto size = static_cast<int64_t>(idx.size());
  const std::string& path = idx_.path();
  MARROW_CHECK(size >= kIndexHeaderBytes, ExitCode::kBadInput, rebuild(), "{}: {} bytes, its header alone takes {}",
               path, size, kIndexHeaderBytes);
  const auto header = load<IndexHeader>(idx, 0);
  const std::string_view magic(header.magic, sizeof header.magic);
  MARROW_CHECK(magic == kIndexMagic, ExitCode::kBadInput, rebuild(), "{}: begins with {}, expected {}", path,
               json_quote(magic), json_quote(kIndexMagic));
  const uint64_t version = header.version, sequences = header.sequences, indices = header.document_indices;
  MARROW_CHECK(version == 1, ExitCode::kBadInput, rebuild(), "{}: format version {}, expected 1", path, version);
  dtype_code_ = header.dtype_code;
  const bool known = visit_dtype(dtype_code_, [this](auto zero) { width_ = sizeof zero; });
  MARROW_CHECK(known, ExitCode::kBadInput, rebuild(),
               "{}: dtype code {} holds no token ids; those that do are 1 (uint8), 2 (int8), 3 (int16), 4 (int32), 5 "
               "(int64), 8 (uint16)",
               path, dtype_code_);
  // Each sequence takes 12 bytes and each document index 8: bounds that cannot overflow.
  const auto room = static_cast<uint64_t>(size - kIndexHeaderBytes);
  const bool fits =
      sequences <= room / 12 && indices <= room / 8 && indices >= 1 && sequences * 12 + indices * 8 == room;
  MARROW_CHECK(fits, ExitCode::kBadInput, rebuild(),
               "{}: {} sequences and {} document indices need 12 and 8 bytes each after the header of {}, but the file "
               "has {} bytes",
               path, sequences, indices, kIndexHeaderBytes, size);
  sequences_ = static_cast<int64_t>(sequences);
  documents_ = static_cast<int64_t>(indices) - 1;
}

void IndexedCorpus::check_sequences() {
  const auto bin_size = static_cast<int64_t>(bin_.bytes().size());
  const std::span<const std::byte> index = idx_.bytes();
  int64_t offset = 0;
  for (int64_t i = 0; i < sequences_; ++i) {
    const auto length = load<int32_t>(index, kIndexHeaderBytes + i * 4);
    const int64_t stored = stored_offset(index, sequences_, i);
    MARROW_CHECK(length >= 0, ExitCode::kBadInput, rebuild(), "{}: sequence {} has length {}", idx_.path(), i, length);
    MARROW_CHECK(stored == offset, ExitCode::kBadInput, rebuild(),
                 "{}: sequence {} begins at byte {}, those before it end at {}", idx_.path(), i, stored, offset);
    offset += length * width_;  // no overflow: bounded by the next line
    MARROW_CHECK(offset <= bin_size, ExitCode::kBadInput, rebuild(),
                 "{}: sequence {} ends at byte {}, but {} has {} bytes", idx_.path(), i, offset, bin_.path(), bin_size);
  }
  MARROW_CHECK(offset == bin_size, ExitCode::kBadInput, rebuild(),
               "{}: its {} sequences of {}-byte tokens take {} bytes, but {} has {}", idx_.path(), sequences_, width_,
               offset, bin_.path(), bin_size);
  tokens_ = bin_size / width_;
}

void IndexedCorpus::check_documents() const {
  const std::span<const std::byte> index = idx_.bytes();
  int64_t previous = 0;
  for (int64_t d = 0; d <= documents_; ++d) {
    const int64_t first = stored_document(index, sequences_, d);
    const int64_t lowest = d == documents_ ? sequences_ : previous;
    const int64_t highest = d == 0 ? 0 : sequences_;
    MARROW_CHECK(first >= lowest && first <= highest, ExitCode::kBadInput, rebuild(),
                 "{}: document index {} is {}, expected {} to {}", idx_.path(), d, first, lowest, highest);
    previous = first;
  }
}

void IndexedCorpus::read_info() {
  const std::string path = prefix_ + ".json";
  if (!fs::exists(path)) {
    warning_ = fmt::format("corpus {} has no {}: its tokenizer is unknown, only the range of its ids can be checked",
                           prefix_, path);
    return;
  }
  const Json json = Json::read_file(path);
  // An integer of PREFIX.json, which must lie in [lowest, highest].
  const auto integer = [&](const char* key, int64_t lowest, int64_t highest, const std::string& why) {
    const int64_t value = json.at(key).as_int();
    if (value < lowest || value > highest) json.at(key).fail(fmt::format("{}, but {}", value, why), rebuild());
    return value;
  };
  integer("documents", documents_, documents_, fmt::format("{} holds {}", idx_.path(), documents_));
  integer("tokens", tokens_, tokens_, fmt::format("{} holds {}", idx_.path(), tokens_));
  CorpusInfo& info = info_.emplace();
  info.tokenizer = json.at("tokenizer").as_string();
  info.tokenizer_hash = json.at("tokenizer_hash").as_string();
  info.vocab_size = integer("vocab_size", 1, INT32_MAX, "a vocabulary has 1 to 2^31 - 1 ids");
  if (!json.at("end_of_document").is_null()) {
    info.end_of_document = static_cast<int32_t>(
        integer("end_of_document", 0, info.vocab_size - 1, fmt::format("\"vocab_size\" is {}", info.vocab_size)));
  }
  if (json.has("bin_crc32")) {
    info.checksum = static_cast<uint32_t>(integer("bin_crc32", 0, UINT32_MAX, "a CRC-32 has 32 bits"));
  }
  const uint8_t code = corpus_dtype_code(info.vocab_size);
  MARROW_CHECK(dtype_code_ == code, ExitCode::kBadInput, rebuild(),
               "{}: dtype code {}, but \"vocab_size\" {} in {} wants {}", idx_.path(), dtype_code_, info.vocab_size,
               path, code);
}

void IndexedCorpus::read(int64_t first, std::span<int32_t> out, int64_t vocab_size) const {
  const auto count = static_cast<int64_t>(out.size());
  MARROW_CHECK(first >= 0 && count <= tokens_ && first <= tokens_ - count, ExitCode::kUsage,
               Fix("read inside the corpus"), "corpus {}: tokens [{}, {}) of {}", prefix_, first, first + count,
               tokens_);
  visit_dtype(dtype_code_, [&](auto stored) {
    const std::byte* const from = bin_.bytes().data() + first * width_;
    auto lowest = stored, highest = stored;
    const auto fetch = [&](size_t i) { std::memcpy(&stored, from + i * sizeof stored, sizeof stored); };
    for (size_t i = 0; i < out.size(); ++i) {
      fetch(i);
      lowest = std::min(lowest, stored);
      highest = std::max(highest, stored);
      out[i] = static_cast<int32_t>(stored);
    }
    if (lowest >= 0 && static_cast<int64_t>(highest) < vocab_size) return;
    size_t bad = 0;
    fetch(bad);
    while (stored >= 0 && static_cast<int64_t>(stored) < vocab_size) fetch(++bad);
    MARROW_THROW(ExitCode::kBadInput,
                 Fix("use the corpus with a model whose vocab_size covers its tokenizer, or tokenize it again with the "
                     "model's tokenizer"),
                 "corpus {}: token {} has id {}, outside the vocabulary: vocab_size is {}", prefix_,
                 first + static_cast<int64_t>(bad), stored, vocab_size);
  });
}

int64_t IndexedCorpus::document_begin(int64_t document) const { return document_begin(idx_.bytes(), document); }

int64_t IndexedCorpus::document_begin(std::span<const std::byte> index, int64_t document) const {
  const int64_t sequence = stored_document(index, sequences_, document);
  return sequence == sequences_ ? tokens_ : stored_offset(index, sequences_, sequence) / width_;
}

int64_t IndexedCorpus::document_after(int64_t token) const {
  const std::span<const std::byte> index = idx_.bytes();
  int64_t first = 0, last = documents_;  // it is one of these
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    document_begin(index, middle) > token ? last = middle : first = middle + 1;
  }
  return first;
}

std::string IndexedCorpus::content_hash() const {
  constexpr size_t kSamples = 256, kSampleBytes = size_t{1} << 20;
  const std::span<const std::byte> bin = bin_.bytes();
  const size_t step = std::max(bin.size() / kSamples, kSampleBytes);
  uint32_t tokens = 0;
  for (size_t at = 0; at < bin.size(); at += step) {
    tokens = crc32(tokens, bin.subspan(at, std::min(kSampleBytes, bin.size() - at)));
  }
  const uint32_t told = info_ && info_->checksum ? *info_->checksum : tokens;
  MARROW_CHECK(step > kSampleBytes || told == tokens, ExitCode::kBadInput, rebuild(),
               "{}: its CRC-32 is {}, but \"bin_crc32\" in {}.json is {}", bin_.path(), tokens, prefix_, told);
  return fmt::format("{:08x}{:08x}{:08x}", crc32(0, idx_.bytes()), told, tokens);
}

}  // namespace marrow
