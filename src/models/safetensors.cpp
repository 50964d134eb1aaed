#include "models/safetensors.h"

#include <bit>
#include <filesystem>

#include "base/json.h"

namespace marrow {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr int64_t kPartElements = int64_t{1} << 26;

// The element types of model files; any other is refused by name.
// clang-format off
constexpr std::pair<std::string_view, at::ScalarType> kDtypes[] = {
    {"F32", at::kFloat}, {"BF16", at::kBFloat16}, {"F16", at::kHalf}, {"F64", at::kDouble}, {"I64", at::kLong},
    {"I32", at::kInt}, {"I8", at::kChar}, {"U8", at::kByte}, {"BOOL", at::kBool}, {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2}};
// clang-format on

Fix fetch_again() { return Fix("copy or download the file again; it is damaged"); }

// Bytes of a tensor, or nothing where they exceed 63 bits; where a size is 0, where the others' do, from which the
// strides come.
std::optional<int64_t> bytes_of(at::ScalarType dtype, at::IntArrayRef shape) {
  int64_t bytes = static_cast<int64_t>(at::elementSize(dtype));
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
  }
  return std::ranges::count(shape, 0) > 0 ? 0 : bytes;
}

StoredTensor read_entry(const std::string& name, const Json& entry, int64_t data_begin, int64_t data_bytes) {
  const Json dtype = entry.at("dtype"), shape = entry.at("shape"), offsets = entry.at("data_offsets");
  const auto known = std::ranges::find(kDtypes, dtype.as_string(), [](const auto& pair) { return pair.first; });
  if (known == std::end(kDtypes)) dtype.fail("no dtype that marrow reads: " + dtype.dump(), fetch_again());
  StoredTensor tensor{{name, {}}, known->second};
  for (const Json& size : shape.elements()) tensor.shape.push_back(size.as_int());
  const std::optional<int64_t> bytes = bytes_of(tensor.dtype, tensor.shape);
  if (!bytes) shape.fail(shape.dump().substr(0, 80) + " is no possible shape", fetch_again());
  if (offsets.size() != 2) offsets.fail("expected two offsets", fetch_again());
  const int64_t begin = offsets.at(size_t{0}).as_int(), end = offsets.at(1).as_int();
  if (begin < 0 || end < begin || end > data_bytes) {
    offsets.fail(fmt::format("[{}, {}] is out of range; the file holds {} bytes of tensors", begin, end, data_bytes),
                 fetch_again());
  }
  if (end - begin != *bytes) {
    offsets.fail(fmt::format("[{}, {}] spans {} bytes, but {} {} takes {}", begin, end, end - begin, dtype.dump(),
                             shape_text(tensor.shape), *bytes),
                 fetch_again());
  }
  tensor.begin = data_begin + begin;
  tensor.end = data_begin + end;
  return tensor;
}

// Tensors, sorted by place, that leave a gap in the file or overlap are an error.
void check_coverage(const std::vector<StoredTensor>& tensors, int64_t data_begin, int64_t file_bytes,
                    const std::string& path) {
  int64_t position = data_begin;
  std::string previous = "the header";
  for (const StoredTensor& tensor : tensors) {
    MARROW_CHECK(tensor.begin == position, ExitCode::kBadInput, fetch_again(),
                 "{}: tensor {} {} {}: it begins at byte {}, which ends at {}", path, json_quote(tensor.name),
                 tensor.begin < position ? "overlaps" : "leaves a gap after", previous, tensor.begin, position);
    position = tensor.end;
    previous = "tensor " + json_quote(tensor.name);
  }
  MARROW_CHECK(position == file_bytes, ExitCode::kBadInput, fetch_again(),
               "{}: the tensors end at byte {}, but the file has {}", path, position, file_bytes);
}

std::vector<StoredTensor> read_header(const MappedFile& file) {
  const std::string& path = file.path();
  const std::span<const std::byte> bytes = file.bytes();
  const int64_t file_bytes = static_cast<int64_t>(bytes.size());
  MARROW_CHECK(file_bytes >= kLengthBytes, ExitCode::kBadInput, fetch_again(),
               "{} has {} bytes: too short for a safetensors file", path, file_bytes);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  MARROW_CHECK(length <= static_cast<uint64_t>(kMaxHeaderBytes), ExitCode::kBadInput, fetch_again(),
               "{}: a header of {} bytes exceeds the format's limit of {}", path, length, kMaxHeaderBytes);
  const int64_t data_begin = kLengthBytes + static_cast<int64_t>(length);
  MARROW_CHECK(data_begin <= file_bytes, ExitCode::kBadInput, fetch_again(),
               "{}: the header takes {} bytes, but the file ends after {}", path, data_begin, file_bytes);
  const std::string_view json(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  const std::string header = "the safetensors header of " + path;
  MARROW_CHECK(json.starts_with('{'), ExitCode::kBadInput, fetch_again(), "{}: it does not start with '{{'", header);
  std::vector<StoredTensor> tensors;
  try {
    for (const auto& [name, entry] : Json::parse(json, header).items()) {
      if (name != "__metadata__") tensors.push_back(read_entry(name, entry, data_begin, file_bytes - data_begin));
    }
  } catch (const Error& error) {  // says how to mend a JSON file
    MARROW_THROW(ExitCode::kBadInput, Fix("copy or download the file again, or save its tensors as F32, F16 or BF16"),
                 "{}", error.what());
  }
  std::ranges::stable_sort(tensors, {}, [](const auto& tensor) { return std::pair(tensor.begin, tensor.end); });
  check_coverage(tensors, data_begin, file_bytes, path);
  return tensors;
}

// Elements [begin, begin + n) as a CPU tensor: a view of the mapping where it is aligned. Other
// writers do not always align, and a misaligned view would be undefined behaviour.
at::Tensor mapped_part(const MappedFile& file, const StoredTensor& tensor, int64_t begin, int64_t n) {
  const size_t width = at::elementSize(tensor.dtype);
  const std::byte* start = file.bytes().data() + tensor.begin + begin * static_cast<int64_t>(width);
  if (reinterpret_cast<uintptr_t>(start) % width == 0) {
    return at::from_blob(const_cast<std::byte*>(start), {n}, tensor.dtype);
  }
  at::Tensor copy = at::empty({n}, tensor.dtype);
  std::memcpy(copy.data_ptr(), start, copy.nbytes());
  return copy;
}

}  // namespace

std::string_view dtype_name(at::ScalarType dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (type == dtype) return name;
  }
  MARROW_THROW(ExitCode::kUsage, Fix("convert the tensor to fp32 first"), "a tensor of {} cannot be saved",
               at::toString(dtype));
}

std::string shape_text(at::IntArrayRef shape) { return json_text(shape); }

SafetensorsLayout layout_safetensors(std::string file_name, std::vector<StoredTensor> tensors) {
  SafetensorsLayout layout{std::move(file_name), {}, std::move(tensors), 0};
  JsonWriter json;
  json.raw("__metadata__", R"({"format": "pt"})");  // transformers wants it
  int64_t position = 0;
  for (StoredTensor& tensor : layout.tensors) {
    const std::optional<int64_t> bytes = bytes_of(tensor.dtype, tensor.shape);
    MARROW_CHECK(bytes.has_value(), ExitCode::kUsage, Fix("lower the model's sizes"),
                 "tensor {} {} has more bytes than a file can hold", tensor.name, shape_text(tensor.shape));
    tensor.begin = std::exchange(position, position + *bytes);
    tensor.end = position;
    const std::array<int64_t, 2> offsets{tensor.begin, tensor.end};
    json.raw(
        tensor.name,
        JsonWriter().field("dtype", dtype_name(tensor.dtype), "shape", tensor.shape, "data_offsets", offsets).text());
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

std::vector<SafetensorsLayout> layout_shards(const std::string& stem, const std::vector<StoredTensor>& tensors,
                                             int64_t max_bytes) {
  std::vector<std::vector<StoredTensor>> shards;
  int64_t left = 0;
  for (const StoredTensor& tensor : tensors) {
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
    layouts.push_back(
        layout_safetensors(fmt::format("{}-{:05}-of-{:05}.safetensors", stem, i + 1, shards.size()), shards[i]));
  }
  return layouts;
}

std::vector<std::string> tensor_paths(const std::string& folder, std::string_view prefix) {
  std::vector<std::string> paths;
  if (!std::filesystem::is_directory(folder)) return paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix) && name.ends_with(".safetensors")) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

TensorFiles::TensorFiles(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    files_.emplace_back(path);
    for (StoredTensor& tensor : read_header(files_.back())) {
      const std::string& name = names_.emplace_back(tensor.name);
      const auto [place, is_new] = places_.try_emplace(name, Place{files_.size() - 1, std::move(tensor)});
      MARROW_CHECK(is_new, ExitCode::kBadInput, Fix("remove the file that does not belong there"),
                   "tensor {} is both in {} and in {}", name, files_[place->second.file].path(), path);
    }
  }
}

const StoredTensor* TensorFiles::find(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &found->second.tensor;
}

void TensorFiles::read(const std::string& name, int64_t begin, at::Tensor out) const {
  const auto& [file, tensor] = places_.at(name);
  MARROW_CHECK(begin >= 0 && begin + out.numel() <= tensor.elements(), ExitCode::kBadInput,
               Fix("check that config.json and the weights belong together"),
               "elements [{}, {}) of tensor {} were asked for, but {} holds {}", begin, begin + out.numel(), name,
               files_[file].path(), tensor.elements());
  for (int64_t done = 0; done < out.numel(); done += kPartElements) {
    const int64_t n = std::min(kPartElements, out.numel() - done);
    out.narrow(0, done, n).copy_(mapped_part(files_[file], tensor, begin + done, n));
  }
}

at::Tensor TensorFiles::read_whole(const std::string& name) const {
  const StoredTensor& tensor = places_.at(name).tensor;
  at::Tensor out = at::empty({tensor.elements()}, tensor.dtype);
  read(name, 0, out);
  return out.view(tensor.shape);
}

}  // namespace marrow
