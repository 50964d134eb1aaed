// The safetensors file format: 8 bytes little-endian header length, a JSON header, tensor bytes.
// Source: https://github.com/huggingface/safetensors (its README's "Format").
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"

namespace marrow {

// The element types of model files; any other is refused by name.
enum class TensorDtype { kBool, kU8, kI8, kF8E5M2, kF8E4M3, kF16, kBF16, kI32, kF32, kI64, kF64 };

int64_t byte_width(TensorDtype dtype);
std::string_view dtype_name(TensorDtype dtype);  // "BF16", as the header writes it

// What a file is to hold.
struct TensorDeclaration {
  std::string name;
  TensorDtype dtype = TensorDtype::kF32;
  std::vector<int64_t> shape;  // row-major; empty for a scalar
};

// A declared tensor with its place: bytes [begin, end) of the file, the header included.
struct StoredTensor : TensorDeclaration {
  int64_t begin = 0, end = 0;
  int64_t elements() const { return (end - begin) / byte_width(dtype); }
};

// The bytes before the tensors and the place of each tensor: a pure function of the declarations,
// in their order, so that several processes can write parts of one file.
struct SafetensorsLayout {
  std::string file_name;
  std::string header;  // length and JSON, padded with spaces to a multiple of 8 bytes
  std::vector<StoredTensor> tensors;
  int64_t file_bytes = 0;
};

SafetensorsLayout layout_safetensors(std::string file_name,
                                     const std::vector<TensorDeclaration>& tensors);

// Cuts `tensors`, in order, into files STEM-0000N-of-0000M.safetensors of at most `max_bytes` of
// tensors (one larger tensor has a file to itself). No tensors give no files.
std::vector<SafetensorsLayout> layout_shards(const std::string& stem,
                                             const std::vector<TensorDeclaration>& tensors,
                                             int64_t max_bytes);

// A file mapped read-only. The constructor checks all of the header before any tensor can be read:
// its length, JSON and keys, dtypes, shapes, and that the tensors cover the rest of the file
// without gap, overlap or excess. Every fault is an Error (kBadInput) naming file and tensor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // by place in the file
  std::span<const std::byte> bytes(const StoredTensor& tensor) const;    // may be misaligned
  const std::string& path() const { return file_.path(); }

 private:
  MappedFile file_;
  std::vector<StoredTensor> tensors_;
};

// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace marrow
