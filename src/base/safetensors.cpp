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

struct DtypeInfo {
  std::string_view name;
  int64_t width;
};
// In the order of TensorDtype.
constexpr std::array<DtypeInfo, 15> kDtypes{{{"BOOL", 1},
                                             {"U8", 1},
                                             {"I8", 1},
                                             {"F8_E5M2", 1},
                                             {"F8_E4M3", 1},
                                             {"I16", 2},
                                             {"U16", 2},
                                             {"F16", 2},
                                             {"BF16", 2},
                                             {"I32", 4},
                                             {"U32", 4},
                                             {"F32", 4},
                                             {"I64", 8},
                                             {"U64", 8},
                                             {"F64", 8}}};

Fix fetch_again() { return Fix("copy or download the file again; it is damaged"); }

std::optional<TensorDtype> dtype_of(std::string_view name) {
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    if (kDtypes[i].name == name) return static_cast<TensorDtype>(i);
  }
  return std::nullopt;
}

// Bytes of a tensor, or nothing where they exceed 63 bits.
std::optional<int64_t> bytes_of(TensorDtype dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = byte_width(dtype);
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

std::string header_entry(const TensorDeclaration& tensor, int64_t begin, int64_t end) {
  const std::string value = JsonWriter()
                                .field("dtype", dtype_name(tensor.dtype))
                                .field("shape", tensor.shape)
                                .field("data_offsets", std::vector<int64_t>{begin, end})
                                .text();
  return ", " + json_quote(tensor.name) + ": " + value;
}

StoredTensor read_entry(const std::string& name, const Json& entry, int64_t data_begin,
                        int64_t file_bytes) {
  const std::string dtype = entry.at("dtype").as_string();
  const std::optional<TensorDtype> known = dtype_of(dtype);
  if (!known) entry.at("dtype").fail("unknown dtype " + json_quote(dtype), fetch_again());
  StoredTensor tensor{name, *known, {}, 0, 0};
  const Json shape = entry.at("shape");
  for (size_t i = 0; i < shape.size(); ++i) tensor.shape.push_back(shape.at(i).as_int());
  const std::optional<int64_t> bytes = bytes_of(tensor.dtype, tensor.shape);
  if (!bytes) shape.fail(shape.dump().substr(0, 80) + " is no possible shape", fetch_again());
  const Json offsets = entry.at("data_offsets");
  if (offsets.size() != 2) offsets.fail("expected two offsets", fetch_again());
  const int64_t begin = offsets.at(size_t{0}).as_int(), end = offsets.at(1).as_int();
  if (begin < 0 || end < begin || end > file_bytes - data_begin) {
    offsets.fail(
        fmt::format("offsets [{}, {}] are out of range; the file holds {} bytes of tensors", begin,
                    end, file_bytes - data_begin),
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

}  // namespace

int64_t byte_width(TensorDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].width; }
std::string_view dtype_name(TensorDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += fmt::format("{}{}", text.empty() ? "" : ", ", size);
  return "[" + text + "]";
}

SafetensorsLayout layout_safetensors(std::string file_name,
                                     const std::vector<TensorDeclaration>& tensors) {
  SafetensorsLayout layout;
  layout.file_name = std::move(file_name);
  // transformers refuses a file whose metadata does not name the framework.
  std::string json = R"({"__metadata__": {"format": "pt"})";
  int64_t position = 0;
  for (const TensorDeclaration& tensor : tensors) {
    const std::optional<int64_t> bytes = bytes_of(tensor.dtype, tensor.shape);
    MARROW_CHECK(bytes.has_value(), ExitCode::kUsage, Fix("lower the model's sizes"),
                 "tensor {} {} has more bytes than a file can hold", tensor.name,
                 shape_text(tensor.shape));
    json += header_entry(tensor, position, position + *bytes);
    layout.tensors.push_back(
        {tensor.name, tensor.dtype, tensor.shape, position, position + *bytes});
    position += *bytes;
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const uint64_t length = json.size();
  layout.header.assign(reinterpret_cast<const char*>(&length), sizeof length);
  layout.header += json;
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
  int64_t filled = 0;
  for (const TensorDeclaration& tensor : tensors) {
    const int64_t bytes = bytes_of(tensor.dtype, tensor.shape).value_or(INT64_MAX);
    if (shards.empty() || bytes > max_bytes - filled) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(tensor);
    filled = bytes > INT64_MAX - filled ? INT64_MAX : filled + bytes;
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
  read_header({reinterpret_cast<const char*>(file_.bytes().data()) + kLengthBytes,
               static_cast<size_t>(length)},
              data_begin);
  check_coverage(data_begin);
  for (const StoredTensor& tensor : tensors_) by_name_.emplace(tensor.name, &tensor);
}

void SafetensorsFile::read_header(std::string_view json, int64_t data_begin) {
  MARROW_CHECK(!json.empty() && json.front() == '{', ExitCode::kBadInput, fetch_again(),
               "{}: the header does not start with '{{'", path());
  const Json header = Json::parse(json, path());
  const int64_t file_bytes = static_cast<int64_t>(file_.bytes().size());
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      tensors_.push_back(read_entry(name, entry, data_begin, file_bytes));
    }
  }
  std::stable_sort(tensors_.begin(), tensors_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
}

void SafetensorsFile::check_coverage(int64_t data_begin) const {
  int64_t position = data_begin;
  std::string previous = "the header";
  for (const StoredTensor& tensor : tensors_) {
    MARROW_CHECK(tensor.begin == position, ExitCode::kBadInput, fetch_again(),
                 "{}: tensor {} {} {}: it begins at byte {}, which ends at {}", path(),
                 json_quote(tensor.name),
                 tensor.begin < position ? "overlaps" : "leaves a gap after", previous,
                 tensor.begin, position);
    position = tensor.end;
    previous = "tensor " + json_quote(tensor.name);
  }
  const int64_t file_bytes = static_cast<int64_t>(file_.bytes().size());
  MARROW_CHECK(position == file_bytes, ExitCode::kBadInput, fetch_again(),
               "{}: the tensors end at byte {}, but the file has {}", path(), position, file_bytes);
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

std::span<const std::byte> SafetensorsFile::bytes(const StoredTensor& tensor) const {
  return file_.bytes().subspan(static_cast<size_t>(tensor.begin),
                               static_cast<size_t>(tensor.end - tensor.begin));
}

}  // namespace marrow
