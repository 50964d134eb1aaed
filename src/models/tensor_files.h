// Named tensors in a set of safetensors files, read in parts.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "base/safetensors.h"
#include "ops/pch.h"

namespace marrow {

TensorDtype stored_dtype(at::ScalarType dtype);  // error for dtypes that no file of ours holds
at::ScalarType scalar_type(const StoredTensor& tensor);  // error where libtorch has none

class TensorFiles {
 public:
  // Opens and checks every file. A name in two files is an error.
  explicit TensorFiles(const std::vector<std::string>& paths);

  const StoredTensor* find(std::string_view name) const;  // nullptr if absent
  std::vector<std::string> names() const;                 // in file order
  const std::string& path_of(std::string_view name) const;
  // Copies elements [begin, begin + out.numel()) of a tensor into `out` ([n], any device),
  // converting to its dtype. Reads only those bytes, in bounded parts.
  void read(std::string_view name, int64_t begin, at::Tensor out) const;
  at::Tensor read_whole(std::string_view name) const;  // its own shape and dtype, on the CPU

 private:
  struct Place {
    size_t file = 0;
    const StoredTensor* tensor = nullptr;
  };
  std::vector<SafetensorsFile> files_;
  std::unordered_map<std::string_view, Place> places_;
};

}  // namespace marrow
