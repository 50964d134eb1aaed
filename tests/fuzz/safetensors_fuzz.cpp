// A safetensors file: its header's JSON and its tensors' bytes, or where these are not apart, the whole file; and the
// layout of what was accepted.
#include "models/safetensors.h"

#include <cstring>

#include "fuzz/fuzz_target.h"

namespace marrow {
namespace {

using namespace fuzz;  // NOLINT

std::string file_of(std::string_view input) {
  const auto parts = parts_of(input, 2);
  if (parts[1].empty() && !parts[0].starts_with('{')) return std::string(input);
  const uint64_t length = parts[0].size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  return file + parts[0] + parts[1];
}

void read_all(const ScratchFolder& folder, const TensorFiles& files) {
  std::vector<StoredTensor> tensors;
  int64_t bytes = 0;
  for (const std::string& name : files.names()) {
    const StoredTensor& tensor = tensors.emplace_back(*files.find(name));
    bytes += tensor.end - tensor.begin;
    const at::Tensor value = files.read_whole(name);
    require(value.sizes() == at::IntArrayRef(tensor.shape) && value.scalar_type() == tensor.dtype, "a tensor is whole");
    require(static_cast<int64_t>(value.nbytes()) == tensor.end - tensor.begin, "a tensor is as large as its place");
    at::Tensor beyond = at::empty({1}, tensor.dtype);
    require(!accepts([&] { files.read(name, tensor.elements(), beyond); }), "nothing is read behind the end");
  }
  const SafetensorsLayout layout = layout_safetensors("again", tensors);
  require(layout.file_bytes == static_cast<int64_t>(layout.header.size()) + bytes, "a layout has no gap");
  const TensorFiles again(
      {folder.write("again.safetensors", layout.header + std::string(static_cast<size_t>(bytes), '\0'))});
  require(again.names().size() == tensors.size(), "a layout reads back");
  for (const StoredTensor& tensor : layout.tensors) {
    const StoredTensor* const found = again.find(tensor.name);
    require(found != nullptr && found->shape == tensor.shape && found->dtype == tensor.dtype &&
                found->begin == tensor.begin && found->end == tensor.end,
            "a layout reads back to the same places");
  }
}

}  // namespace
}  // namespace marrow

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const marrow::fuzz::ScratchFolder folder;
  const std::string path = folder.write("file.safetensors", marrow::file_of(marrow::fuzz::text_of(data, size)));
  marrow::fuzz::accepts([&] { marrow::read_all(folder, marrow::TensorFiles({path})); });
  return 0;
}
