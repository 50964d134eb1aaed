#include "base/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>

#include "base/json.h"

namespace marrow {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit

// In the order of TensorDtype.
constexpr std::array<std::string_view, 11> kNames{"BOOL", "U8",  "I8",  "F8_E5M2", "F8_E4M3", "F16",
                                                  "BF16", "I32", "F32", "I64",     "F64"};
constexpr std::array<int64_t, 11> kWidths{1, 1, 1, 1, 1, 2, 2, 4, 4, 8, 8};

Fix fetch_again() { return Fix("copy or download the file again; it is damaged"); }

// Bytes of a tensor, or nothing where they exceed 63 bits.
std::optional<int64_t> bytes_of(TensorDtype dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = byte_width(dtype);
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

StoredTensor read_entry(const std::string& name, const Json& entry, int64_t data_begin,
                        int64_t data_bytes) {
  const std::string dtype = entry.at("dtype").as_string();
  const auto known = std::find(kNames.begin(), kNames.end(), dtype);
  if (known == kNames.end()) {
    entry.at("dtype").fail("dtype " + json_quote(dtype) + " is not supported", fetch_again());
  }
  StoredTensor tensor;
  tensor.name = name;
  tensor.dtype = static_cast<TensorDtype>(known - kNames.begin());
  const Json shape = entry.at("shape");
  for (size_t i = 0; i < shape.size(); ++i) tensor.shape.push_back(shape.at(i).as_int());
  const std::optional<int64_t> bytes = bytes_of(tensor.dtype, tensor.shape);
  if (!bytes) shape.fail(shape.dump().substr(0, 80) + " is no possible shape", fetch_again());
  const Json offsets = entry.at("data_offsets");
  if (offsets.size() != 2) offsets.fail("expected two offsets", fetch_again());
  const int64_t begin = offsets.at(size_t{0}).as_int(), end = offsets.at(1).as_int();
  if (begin < 0 || end < begin || end > data_bytes) {
    offsets.fail(
        fmt::format("offsets [{}, {}] are out of range; the file holds {} bytes of tensors", begin,
                    end, data_bytes),
        fetch_again());
  }
  if (end - begin != *bytes) {
    offsets.fail(fmt::format("offsets [{}, {}] span {} bytes, but {} {} takes {}", begin, end,
                             end - begin, dtype, shape_text(tensor.shape), *bytes),
                 fetch_again());
  }
  tensor.begin = data_begin + begin;
  tensor.end = data_begin + end;
  return tensor;
}

// Tensors, sorted by place, that leave a gap in the file or overlap are an error.
void check_coverage(const std::vector<StoredTensor>& tensors, int64_t data_begin,
                    int64_t file_bytes, const std::string& path) {
  int64_t position = data_begin;
  std::string previous = "the header";
  for (const StoredTensor& tensor : tensors) {
    MARROW_CHECK(tensor.begin == position, ExitCode::kBadInput, fetch_again(),
                 "{}: tensor {} {} {}: it begins at byte {}, which ends at {}", path,
                 json_quote(tensor.name),
                 tensor.begin < position ? "overlaps" : "leaves a gap after", previous,
                 tensor.begin, position);
    position = tensor.end;
    previous = "tensor " + json_quote(tensor.name);
  }
  MARROW_CHECK(position == file_bytes, ExitCode::kBadInput, fetch_again(),
               "{}: the tensors end at byte {}, but the file has {}", path, position, file_bytes);
}

}  // namespace

int64_t byte_width(TensorDtype dtype) { return kWidths[static_cast<size_t>(dtype)]; }
std::string_view dtype_name(TensorDtype dtype) { return kNames[static_cast<size_t>(dtype)]; }
std::string shape_text(const std::vector<int64_t>& shape) { return json_text(shape); }

SafetensorsLayout layout_safetensors(std::string file_name,
                                     const std::vector<TensorDeclaration>& tensors) {
  SafetensorsLayout layout{std::move(file_name), {}, {}, 0};
  JsonWriter json;
  json.raw("__metadata__", R"({"format": "pt"})");  // transformers wants it
  int64_t position = 0;
  for (const TensorDeclaration& tensor : tensors) {
    const std::optional<int64_t> bytes = bytes_of(tensor.dtype, tensor.shape);
    MARROW_CHECK(bytes.has_value(), ExitCode::kUsage, Fix("lower the model's sizes"),
                 "tensor {} {} has more bytes than a file can hold", tensor.name,
                 shape_text(tensor.shape));
    const std::array<int64_t, 2> offsets{position, position + *bytes};
    JsonWriter entry;
    entry.field("dtype", dtype_name(tensor.dtype)).field("shape", tensor.shape);
    json.raw(tensor.name, entry.field("data_offsets", offsets).text());
    layout.tensors.push_back({tensor, offsets[0], offsets[1]});
    position += *bytes;
  }
  std::string text = json.text();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  layout.header.assign(reinterpret_cast<const char*>(&length), sizeof length).append(text);
  const int64_t data_begin = static_cast<int64_t>(layout.header.size());
  for (StoredTensor& tensor : layout.tensors) {
    tensor.begin += data_begin;
    tensor.end += data_begin;
  }
  layout.file_bytes = data_begin + position;
  return layout;
}

std::vector<SafetensorsLayout> layout_shards(const std::string& stem,
                                             const std::vector<TensorDeclaration>& tensors,
                                             int64_t max_bytes) {
  std::vector<std::vector<TensorDeclaration>> shards;
  int64_t left = 0;
  for (const TensorDeclaration& tensor : tensors) {
    const int64_t bytes = bytes_of(tensor.dtype, tensor.shape).value_or(INT64_MAX);
    if (shards.empty() || bytes > left) {
      shards.emplace_back();
      left = max_bytes;
    }
    shards.back().push_back(tensor);
    left = std::max<int64_t>(left - bytes, 0);
  }
  std::vector<SafetensorsLayout> layouts;
  for (size_t i = 0; i < shards.size(); ++i) {
    layouts.push_back(layout_safetensors(
        fmt::format("{}-{:05}-of-{:05}.safetensors", stem, i + 1, shards.size()), shards[i]));
  }
  return layouts;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  const int64_t file_bytes = static_cast<int64_t>(file_.bytes().size());
  MARROW_CHECK(file_bytes >= kLengthBytes, ExitCode::kBadInput, fetch_again(),
               "{} has {} bytes: too short for a safetensors file", path, file_bytes);
  uint64_t length = 0;
  std::memcpy(&length, file_.bytes().data(), sizeof length);
  MARROW_CHECK(length <= static_cast<uint64_t>(kMaxHeaderBytes), ExitCode::kBadInput, fetch_again(),
               "{}: a header of {} bytes exceeds the format's limit of {}", path, length,
               kMaxHeaderBytes);
  const int64_t data_begin = kLengthBytes + static_cast<int64_t>(length);
  MARROW_CHECK(data_begin <= file_bytes, ExitCode::kBadInput, fetch_again(),
               "{}: the header takes {} bytes, but the file ends after {}", path, data_begin,
               file_bytes);
  const std::string_view json(reinterpret_cast<const char*>(file_.bytes().data()) + kLengthBytes,
                              static_cast<size_t>(length));
  MARROW_CHECK(json.starts_with('{'), ExitCode::kBadInput, fetch_again(),
               "{}: the header does not start with '{{'", path);
  for (const auto& [name, entry] : Json::parse(json, path).items()) {
    if (name == "__metadata__") continue;
    tensors_.push_back(read_entry(name, entry, data_begin, file_bytes - data_begin));
  }
  std::stable_sort(tensors_.begin(), tensors_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_coverage(tensors_, data_begin, file_bytes, path);
}

std::span<const std::byte> SafetensorsFile::bytes(const StoredTensor& tensor) const {
  return file_.bytes().subspan(static_cast<size_t>(tensor.begin),
                               static_cast<size_t>(tensor.end - tensor.begin));
}

}  // namespace marrow
