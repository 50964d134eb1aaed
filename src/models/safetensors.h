// The safetensors file format: 8 bytes little-endian header length, a JSON header, tensor bytes.
// Source: https://github.com/huggingface/safetensors (its README's "Format").
#pragma once
#include "base/files.h"
#include "ops/parameter_spec.h"
#include "ops/pch.h"

namespace marrow {

// A tensor with its place: bytes [begin, end) of the file, the header included.
struct StoredTensor : HubTensor {
  at::ScalarType dtype = at::kFloat;
  int64_t begin = 0, end = 0;
};

std::string_view dtype_name(at::ScalarType dtype);  // "BF16", as the header writes it
std::string shape_text(at::IntArrayRef shape);      // "[2, 3]"

// The bytes before the tensors and the place of each tensor: a pure function of the names, dtypes and shapes, in their
// order, so that several processes can write parts of one file.
struct SafetensorsLayout {
  std::string file_name;
  std::string header;  // length and JSON, padded with spaces to a multiple of 8 bytes
  std::vector<StoredTensor> tensors;
  int64_t file_bytes = 0;
};

SafetensorsLayout layout_safetensors(std::string file_name, std::vector<StoredTensor> tensors);

// Cuts `tensors`, in order, into files STEM-0000N-of-0000M.safetensors of at most `max_bytes` of tensors (one larger
// tensor has a file to itself). No tensors give no files.
std::vector<SafetensorsLayout> layout_shards(const std::string& stem, const std::vector<StoredTensor>& tensors,
                                             int64_t max_bytes);

// The files of `folder` that are called PREFIX….safetensors, sorted.
std::vector<std::string> tensor_paths(const std::string& folder, std::string_view prefix);

// The tensors of a set of files, mapped and read in parts. The constructor checks all headers: length, JSON, keys,
// dtypes, shapes, that the tensors cover the rest of the file without gap, overlap or excess, and that no name is in
// two files. Every fault is an Error (kBadInput) naming file and tensor.
class TensorFiles {
 public:
  explicit TensorFiles(const std::vector<std::string>& paths);

  const StoredTensor* find(const std::string& name) const;          // nullptr if absent
  const std::vector<std::string>& names() const { return names_; }  // in file order
  // Copies elements [begin, begin + out.numel()) of a tensor into `out` ([n], any device), converting to its dtype.
  // Reads only those bytes, in bounded parts.
  void read(const std::string& name, int64_t begin, at::Tensor out) const;
  at::Tensor read_whole(const std::string& name) const;  // its own shape and dtype, on the CPU

 private:
  struct Place {
    size_t file;  // index in files_
    StoredTensor tensor;
  };
  std::vector<MappedFile> files_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, Place> places_;
};

}  // namespace marrow
