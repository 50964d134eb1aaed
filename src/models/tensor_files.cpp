#include "models/tensor_files.h"

namespace marrow {
namespace {

constexpr int64_t kReadElements = int64_t{1} << 26;

// Elements [begin, begin + n) as a CPU tensor: a view of the mapping where it is aligned. Other
// writers do not always align, and a misaligned view would be undefined behaviour.
at::Tensor mapped_part(std::span<const std::byte> bytes, at::ScalarType dtype, int64_t width,
                       int64_t begin, int64_t n) {
  const std::byte* start = bytes.data() + begin * width;
  if (reinterpret_cast<uintptr_t>(start) % static_cast<uintptr_t>(width) == 0) {
    return at::from_blob(const_cast<std::byte*>(start), {n}, dtype);
  }
  at::Tensor copy = at::empty({n}, dtype);
  std::memcpy(copy.data_ptr(), start, static_cast<size_t>(n * width));
  return copy;
}

}  // namespace

TensorDtype stored_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return TensorDtype::kF32;
    case at::kBFloat16:
      return TensorDtype::kBF16;
    case at::kHalf:
      return TensorDtype::kF16;
    case at::kDouble:
      return TensorDtype::kF64;
    case at::kLong:
      return TensorDtype::kI64;
    case at::kInt:
      return TensorDtype::kI32;
    default:
      MARROW_THROW(ExitCode::kUsage, Fix("convert the tensor to fp32 first"),
                   "a tensor of {} cannot be saved", at::toString(dtype));
  }
}

at::ScalarType scalar_type(const StoredTensor& tensor) {
  switch (tensor.dtype) {
    case TensorDtype::kF32:
      return at::kFloat;
    case TensorDtype::kBF16:
      return at::kBFloat16;
    case TensorDtype::kF16:
      return at::kHalf;
    case TensorDtype::kF64:
      return at::kDouble;
    case TensorDtype::kI64:
      return at::kLong;
    case TensorDtype::kI32:
      return at::kInt;
    case TensorDtype::kU8:
      return at::kByte;
    default:
      MARROW_THROW(ExitCode::kBadInput, Fix("convert the file to F32, BF16 or F16"),
                   "tensor {} is of dtype {}, which marrow does not read", tensor.name,
                   dtype_name(tensor.dtype));
  }
}

TensorFiles::TensorFiles(const std::vector<std::string>& paths) {
  files_.reserve(paths.size());
  for (const std::string& path : paths) {
    files_.emplace_back(path);
    for (const StoredTensor& tensor : files_.back().tensors()) {
      const auto [place, is_new] =
          places_.try_emplace(tensor.name, Place{files_.size() - 1, &tensor});
      MARROW_CHECK(is_new, ExitCode::kBadInput, Fix("remove the file that does not belong there"),
                   "tensor {} is both in {} and in {}", tensor.name,
                   files_[place->second.file].path(), path);
    }
  }
}

const StoredTensor* TensorFiles::find(std::string_view name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : found->second.tensor;
}

std::vector<std::string> TensorFiles::names() const {
  std::vector<std::string> names;
  for (const SafetensorsFile& file : files_) {
    for (const StoredTensor& tensor : file.tensors()) names.push_back(tensor.name);
  }
  return names;
}

const std::string& TensorFiles::path_of(std::string_view name) const {
  return files_[places_.at(name).file].path();
}

void TensorFiles::read(std::string_view name, int64_t begin, at::Tensor out) const {
  const Place place = places_.at(name);
  const StoredTensor& tensor = *place.tensor;
  MARROW_CHECK(begin >= 0 && begin + out.numel() <= tensor.elements(), ExitCode::kBadInput,
               Fix("check the model's config against the file"),
               "elements [{}, {}) of tensor {} were asked for, but {} holds {}", begin,
               begin + out.numel(), name, files_[place.file].path(), tensor.elements());
  const at::ScalarType dtype = scalar_type(tensor);
  const auto bytes = files_[place.file].bytes(tensor);
  for (int64_t done = 0; done < out.numel(); done += kReadElements) {
    const int64_t n = std::min(kReadElements, out.numel() - done);
    out.narrow(0, done, n)
        .copy_(mapped_part(bytes, dtype, byte_width(tensor.dtype), begin + done, n));
  }
}

at::Tensor TensorFiles::read_whole(std::string_view name) const {
  const StoredTensor& tensor = *places_.at(name).tensor;
  at::Tensor out = at::empty({tensor.elements()}, scalar_type(tensor));
  read(name, 0, out);
  return out.view(tensor.shape);
}

}  // namespace marrow
