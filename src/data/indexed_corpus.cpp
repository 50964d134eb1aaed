#include "data/indexed_corpus.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>

#include "base/json.h"

namespace marrow {
namespace {

static_assert(std::endian::native == std::endian::little, "the corpus format is little-endian");

constexpr std::string_view kMagic{"MMIDIDX\0\0", 9};
constexpr int64_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;

Fix rebuild() { return Fix("copy the corpus again, or rebuild it with marrow tokenize"); }

int64_t width_of(uint8_t dtype_code) {
  switch (dtype_code) {
    case 1:
    case 2:
      return 1;  // uint8, int8
    case 3:
    case 8:
      return 2;  // int16, uint16
    case 4:
      return 4;  // int32
    case 5:
      return 8;  // int64
    default:
      return 0;
  }
}

template <class T>
T load(std::span<const std::byte> bytes, int64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// Widens stored ids; true if all lie in [0, vocab_size).
template <class Stored>
bool widen(const std::byte* stored, std::span<int32_t> out, int64_t vocab_size) {
  Stored lowest = 0, highest = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    Stored id;
    std::memcpy(&id, stored + i * sizeof id, sizeof id);
    lowest = std::min(lowest, id);
    highest = std::max(highest, id);
    out[i] = static_cast<int32_t>(id);
  }
  return lowest >= 0 && static_cast<int64_t>(highest) < vocab_size;
}

bool widen_any(uint8_t code, const std::byte* stored, std::span<int32_t> out, int64_t vocab_size) {
  switch (code) {
    case 1:
      return widen<uint8_t>(stored, out, vocab_size);
    case 2:
      return widen<int8_t>(stored, out, vocab_size);
    case 3:
      return widen<int16_t>(stored, out, vocab_size);
    case 4:
      return widen<int32_t>(stored, out, vocab_size);
    case 5:
      return widen<int64_t>(stored, out, vocab_size);
    default:
      return widen<uint16_t>(stored, out, vocab_size);
  }
}

int64_t stored_id(uint8_t code, std::span<const std::byte> bin, int64_t at) {
  switch (code) {
    case 1:
      return load<uint8_t>(bin, at);
    case 2:
      return load<int8_t>(bin, at);
    case 3:
      return load<int16_t>(bin, at * 2);
    case 4:
      return load<int32_t>(bin, at * 4);
    case 5:
      return load<int64_t>(bin, at * 8);
    default:
      return load<uint16_t>(bin, at * 2);
  }
}

// Not cryptographic: it tells different data apart, it does not withstand an adversary.
uint64_t mix_bytes(uint64_t hash, std::span<const std::byte> bytes) {
  const auto mix = [&](uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  };
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) mix(load<uint64_t>(bytes, static_cast<int64_t>(at)));
  uint64_t tail = 0;
  if (at < bytes.size()) std::memcpy(&tail, bytes.data() + at, bytes.size() - at);
  mix(tail);
  mix(bytes.size());
  return hash;
}

const std::string& existing_prefix(const std::string& prefix) {
  for (const char* suffix : {".idx", ".bin"}) {
    MARROW_CHECK(std::filesystem::exists(prefix + suffix), ExitCode::kUsage,
                 Fix("give the corpus' prefix, without .bin or .idx; marrow tokenize --output "
                     "PREFIX makes one"),
                 "corpus {}: {}{} does not exist", prefix, prefix, suffix);
  }
  return prefix;
}

}  // namespace

IndexedCorpus::IndexedCorpus(const std::string& prefix)
    : prefix_(existing_prefix(prefix)), idx_(prefix + ".idx"), bin_(prefix + ".bin") {
  check_header();
  check_sequences();
  check_documents();
  read_info();
}

int64_t IndexedCorpus::index_int64(int64_t byte_offset) const {
  return load<int64_t>(idx_.bytes(), byte_offset);
}

void IndexedCorpus::check_header() {
  const std::span<const std::byte> idx = idx_.bytes();
  const auto size = static_cast<int64_t>(idx.size());
  const std::string& path = idx_.path();
  MARROW_CHECK(size >= kHeaderBytes, ExitCode::kBadInput, rebuild(),
               "{}: {} bytes, its header alone takes {}", path, size, kHeaderBytes);
  MARROW_CHECK(std::memcmp(idx.data(), kMagic.data(), kMagic.size()) == 0, ExitCode::kBadInput,
               rebuild(), "{}: begins with {}, expected {}", path,
               json_quote({reinterpret_cast<const char*>(idx.data()), kMagic.size()}),
               json_quote(kMagic));
  MARROW_CHECK(index_int64(9) == 1, ExitCode::kBadInput, rebuild(),
               "{}: format version {}, expected 1", path, load<uint64_t>(idx, 9));
  dtype_code_ = load<uint8_t>(idx, 17);
  width_ = width_of(dtype_code_);
  MARROW_CHECK(width_ > 0, ExitCode::kBadInput, rebuild(),
               "{}: dtype code {} holds no token ids; those that do are 1 (uint8), 2 (int8), 3 "
               "(int16), 4 (int32), 5 (int64), 8 (uint16)",
               path, dtype_code_);
  const auto sequences = load<uint64_t>(idx, 18), indices = load<uint64_t>(idx, 26);
  // Each sequence takes 12 bytes and each document index 8: bounds that cannot overflow.
  const auto room = static_cast<uint64_t>(size - kHeaderBytes);
  const bool fits = sequences <= room / 12 && indices <= room / 8 && indices >= 1 &&
                    sequences * 12 + indices * 8 == room;
  MARROW_CHECK(fits, ExitCode::kBadInput, rebuild(),
               "{}: {} sequences and {} document indices need 12 and 8 bytes each after the header "
               "of {}, but the file has {} bytes",
               path, sequences, indices, kHeaderBytes, size);
  sequences_ = static_cast<int64_t>(sequences);
  documents_ = static_cast<int64_t>(indices) - 1;
}

void IndexedCorpus::check_sequences() {
  const auto bin_size = static_cast<int64_t>(bin_.bytes().size());
  int64_t offset = 0;
  for (int64_t i = 0; i < sequences_; ++i) {
    const auto length = load<int32_t>(idx_.bytes(), kHeaderBytes + i * 4);
    const int64_t stored = index_int64(kHeaderBytes + sequences_ * 4 + i * 8);
    MARROW_CHECK(length >= 0, ExitCode::kBadInput, rebuild(), "{}: sequence {} has length {}",
                 idx_.path(), i, length);
    MARROW_CHECK(stored == offset, ExitCode::kBadInput, rebuild(),
                 "{}: sequence {} begins at byte {}, those before it end at {}", idx_.path(), i,
                 stored, offset);
    offset += length * width_;  // no overflow: bounded by the next line
    MARROW_CHECK(offset <= bin_size, ExitCode::kBadInput, rebuild(),
                 "{}: sequence {} ends at byte {}, but {} has {} bytes", idx_.path(), i, offset,
                 bin_.path(), bin_size);
  }
  MARROW_CHECK(offset == bin_size, ExitCode::kBadInput, rebuild(),
               "{}: its {} sequences of {}-byte tokens take {} bytes, but {} has {}", idx_.path(),
               sequences_, width_, offset, bin_.path(), bin_size);
  tokens_ = bin_size / width_;
}

void IndexedCorpus::check_documents() const {
  const int64_t base = kHeaderBytes + sequences_ * 12;
  int64_t previous = 0;
  for (int64_t d = 0; d <= documents_; ++d) {
    const int64_t first = index_int64(base + d * 8);
    MARROW_CHECK(d > 0 || first == 0, ExitCode::kBadInput, rebuild(),
                 "{}: the first document index is {}, expected 0", idx_.path(), first);
    MARROW_CHECK(first >= previous && first <= sequences_, ExitCode::kBadInput, rebuild(),
                 "{}: document index {} is {}, expected {} to {}", idx_.path(), d, first, previous,
                 sequences_);
    previous = first;
  }
  MARROW_CHECK(previous == sequences_, ExitCode::kBadInput, rebuild(),
               "{}: the last document index is {}, expected the sequence count {}", idx_.path(),
               previous, sequences_);
}

void IndexedCorpus::read_info() {
  const std::string path = prefix_ + ".json";
  if (!std::filesystem::exists(path)) {
    warning_ = fmt::format(
        "corpus {} has no {}: its tokenizer is unknown, only the range of its ids can be checked",
        prefix_, path);
    return;
  }
  const Json json = Json::read_file(path);
  const auto check = [&](const char* key, int64_t found) {
    MARROW_CHECK(json.at(key).as_int() == found, ExitCode::kBadInput, rebuild(),
                 "{}: \"{}\" is {}, but {} holds {}", path, key, json.at(key).as_int(), idx_.path(),
                 found);
  };
  check("documents", documents_);
  check("tokens", tokens_);
  CorpusInfo& info = info_.emplace();
  info.tokenizer = json.at("tokenizer").as_string();
  info.tokenizer_hash = json.at("tokenizer_hash").as_string();
  info.vocab_size = json.at("vocab_size").as_int();
  if (!json.at("end_of_document").is_null()) {
    info.end_of_document = static_cast<int32_t>(json.at("end_of_document").as_int());
  }
  const uint8_t code = corpus_dtype_code(info.vocab_size);
  MARROW_CHECK(dtype_code_ == code, ExitCode::kBadInput, rebuild(),
               "{}: dtype code {}, but \"vocab_size\" {} in {} wants {}", idx_.path(), dtype_code_,
               info.vocab_size, path, code);
}

void IndexedCorpus::read(int64_t first, std::span<int32_t> out, int64_t vocab_size) const {
  const auto count = static_cast<int64_t>(out.size());
  MARROW_CHECK(first >= 0 && count <= tokens_ && first <= tokens_ - count, ExitCode::kUsage,
               Fix("read inside the corpus"), "corpus {}: tokens [{}, {}) of {}", prefix_, first,
               first + count, tokens_);
  const std::span<const std::byte> bin = bin_.bytes();
  if (widen_any(dtype_code_, bin.data() + first * width_, out, vocab_size)) return;
  int64_t at = first;
  const auto good = [&](int64_t id) { return id >= 0 && id < vocab_size; };
  while (good(stored_id(dtype_code_, bin, at))) ++at;
  MARROW_THROW(ExitCode::kBadInput,
               Fix("use the corpus with a model whose vocab_size covers its tokenizer, or tokenize "
                   "it again with the model's tokenizer"),
               "corpus {}: token {} has id {}, outside the vocabulary: vocab_size is {}", prefix_,
               at, stored_id(dtype_code_, bin, at), vocab_size);
}

int64_t IndexedCorpus::sequence_begin(int64_t sequence) const {
  if (sequence == sequences_) return tokens_;
  return index_int64(kHeaderBytes + sequences_ * 4 + sequence * 8) / width_;
}

int64_t IndexedCorpus::document_begin(int64_t document) const {
  return sequence_begin(index_int64(kHeaderBytes + sequences_ * 12 + document * 8));
}

int64_t IndexedCorpus::document_after(int64_t token) const {
  int64_t low = 0, high = documents_;  // the answer lies in [low, high]
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (document_begin(middle) > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

std::string IndexedCorpus::content_hash() const {
  constexpr int64_t kWhole = int64_t{1} << 20, kSamples = 256;
  const std::span<const std::byte> bin = bin_.bytes();
  const auto size = static_cast<int64_t>(bin.size());
  uint64_t hash = mix_bytes(mix_bytes(0, idx_.bytes()), std::as_bytes(std::span(&size, 1)));
  if (size <= kWhole) {
    hash = mix_bytes(hash, bin);
  } else {
    const int64_t bytes = kWhole / kSamples;
    for (int64_t i = 0; i < kSamples; ++i) {
      const int64_t at = (size - bytes) / (kSamples - 1) * i;
      hash = mix_bytes(hash, bin.subspan(static_cast<size_t>(at), static_cast<size_t>(bytes)));
    }
  }
  return fmt::format("{:016x}", hash);
}

}  // namespace marrow
