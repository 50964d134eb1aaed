#include "models/model_weights.h"

#include <filesystem>
#include <set>

#include "base/json.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kPartElements = int64_t{1} << 24;

struct DtypePair {
  TensorDtype stored;
  at::ScalarType read;
};
constexpr DtypePair kDtypes[] = {
    {TensorDtype::kF32, at::kFloat}, {TensorDtype::kBF16, at::kBFloat16},
    {TensorDtype::kF16, at::kHalf},  {TensorDtype::kF64, at::kDouble},
    {TensorDtype::kI64, at::kLong},  {TensorDtype::kI32, at::kInt},
    {TensorDtype::kU8, at::kByte}};

Fix check_they_belong_together() {
  return Fix("check that config.json and the weights belong together and that no file is missing");
}

// Elements [begin, begin + n) as a CPU tensor: a view of the mapping where it is aligned. Other
// writers do not always align, and a misaligned view would be undefined behaviour.
at::Tensor mapped_part(std::span<const std::byte> bytes, at::ScalarType dtype, int64_t begin,
                       int64_t n) {
  const int64_t width = static_cast<int64_t>(at::elementSize(dtype));
  const std::byte* start = bytes.data() + begin * width;
  if (reinterpret_cast<uintptr_t>(start) % static_cast<uintptr_t>(width) == 0) {
    return at::from_blob(const_cast<std::byte*>(start), {n}, dtype);
  }
  at::Tensor copy = at::empty({n}, dtype);
  std::memcpy(copy.data_ptr(), start, static_cast<size_t>(n * width));
  return copy;
}

std::vector<std::string> weight_paths(const std::string& folder) {
  const std::string index = folder + "/model.safetensors.index.json";
  if (!fs::exists(index)) {
    const std::vector<std::string> paths = tensor_paths(folder, "model");
    MARROW_CHECK(!paths.empty(), ExitCode::kBadInput,
                 Fix("give a checkpoint or a Hugging Face folder with .safetensors files; convert "
                     ".bin files with transformers' save_pretrained"),
                 "{} holds no model*.safetensors", folder);
    return paths;
  }
  std::set<std::string> paths;
  for (const auto& [tensor, file] : Json::read_file(index).at("weight_map").items()) {
    const std::string name = file.as_string(), path = folder + "/" + name;
    if (name.find('/') != std::string::npos || !fs::exists(path)) {
      file.fail(fmt::format("the shard {} is missing from this folder", json_quote(name)),
                Fix("copy or download the missing shard, or repair the index"));
    }
    paths.insert(path);
  }
  return {paths.begin(), paths.end()};
}

}  // namespace

TensorDtype stored_dtype(at::ScalarType dtype) {
  for (const DtypePair& pair : kDtypes) {
    if (pair.read == dtype) return pair.stored;
  }
  MARROW_THROW(ExitCode::kUsage, Fix("convert the tensor to fp32 first"),
               "a tensor of {} cannot be saved", at::toString(dtype));
}

at::ScalarType scalar_type(TensorDtype dtype) {
  for (const DtypePair& pair : kDtypes) {
    if (pair.stored == dtype) return pair.read;
  }
  MARROW_THROW(ExitCode::kBadInput, Fix("convert the file to F32, BF16 or F16"),
               "a tensor of dtype {} cannot be read as weights", dtype_name(dtype));
}

std::vector<std::string> tensor_paths(const std::string& folder, std::string_view prefix) {
  std::vector<std::string> paths;
  if (!fs::is_directory(folder)) return paths;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix) && name.ends_with(".safetensors")) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
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
  MARROW_CHECK(begin >= 0 && begin + out.numel() <= place.tensor->elements(), ExitCode::kBadInput,
               check_they_belong_together(),
               "elements [{}, {}) of tensor {} were asked for, but {} holds {}", begin,
               begin + out.numel(), name, files_[place.file].path(), place.tensor->elements());
  const at::ScalarType dtype = scalar_type(place.tensor->dtype);
  const auto bytes = files_[place.file].bytes(*place.tensor);
  for (int64_t done = 0; done < out.numel(); done += kPartElements) {
    const int64_t n = std::min(kPartElements, out.numel() - done);
    out.narrow(0, done, n).copy_(mapped_part(bytes, dtype, begin + done, n));
  }
}

at::Tensor TensorFiles::read_whole(std::string_view name) const {
  const StoredTensor& tensor = *places_.at(name).tensor;
  at::Tensor out = at::empty({tensor.elements()}, scalar_type(tensor.dtype));
  read(name, 0, out);
  return out.view(tensor.shape);
}

ModelWeights::ModelWeights(const std::string& folder, const std::vector<HubTensor>& model,
                           const WeightRules& rules)
    : folder_(folder), files_(weight_paths(folder)) {
  std::unordered_map<std::string, int64_t> used;  // elements, by name in the files
  for (const HubTensor& tensor : model) {
    const std::optional<Source> source = find_source(tensor);
    MARROW_CHECK(source.has_value(), ExitCode::kBadInput, check_they_belong_together(),
                 "{}: tensor {} is missing", folder_, tensor.name);
    scalar_type(files_.find(source->stored)->dtype);  // refuses dtypes that cannot be read
    used[source->stored] += tensor.elements();
    sources_.emplace(tensor.name, *source);
  }
  check_all_used(used, rules);
}

std::optional<ModelWeights::Source> ModelWeights::find_source(const HubTensor& tensor) const {
  const std::string& name = tensor.name;
  const StoredTensor* stored = files_.find(name);
  if (stored == nullptr) return find_in_stack(tensor);
  MARROW_CHECK(stored->shape == tensor.shape, ExitCode::kBadInput, check_they_belong_together(),
               "{}: tensor {} is {} in the file, but config.json makes it {}", files_.path_of(name),
               name, shape_text(stored->shape), shape_text(tensor.shape));
  return Source{name, 0};
}

// Stacked experts: gate_up_proj [E, 2I, H] holds the rows of gate, then of up.
std::optional<ModelWeights::Source> ModelWeights::find_in_stack(const HubTensor& tensor) const {
  constexpr std::string_view kExperts = ".experts.";
  const size_t number = tensor.name.find(kExperts) + kExperts.size();
  if (number < kExperts.size() || !std::isdigit(tensor.name[number])) return std::nullopt;
  const int64_t expert = std::stoll(tensor.name.substr(number));
  const bool down = tensor.name.ends_with(".down_proj.weight");
  const std::string name = tensor.name.substr(0, number) + (down ? "down_proj" : "gate_up_proj");
  const StoredTensor* stored = files_.find(name);
  if (stored == nullptr) return std::nullopt;
  const int64_t rows = tensor.shape[0], columns = tensor.shape[1];
  const int64_t stacked_rows = down ? rows : 2 * rows;
  const bool fits = stored->shape.size() == 3 && stored->shape[0] > expert &&
                    stored->shape[1] == stacked_rows && stored->shape[2] == columns;
  MARROW_CHECK(fits, ExitCode::kBadInput, check_they_belong_together(),
               "{}: tensor {} is {}, but expert {} of config.json needs [> {}, {}, {}]",
               files_.path_of(name), name, shape_text(stored->shape), expert, expert, stacked_rows,
               columns);
  const bool up = tensor.name.ends_with(".up_proj.weight");
  return Source{name, (expert * stacked_rows + (up ? rows : 0)) * columns};
}

void ModelWeights::check_all_used(const std::unordered_map<std::string, int64_t>& used,
                                  const WeightRules& rules) {
  for (const std::string& name : files_.names()) {
    const auto found = used.find(name);
    if (found != used.end()) {
      const StoredTensor& stored = *files_.find(name);
      MARROW_CHECK(found->second == stored.elements(), ExitCode::kBadInput,
                   Fix("check num_experts in config.json"),
                   "{}: config.json uses {} of the {} elements of tensor {} {}",
                   files_.path_of(name), found->second, stored.elements(), name,
                   shape_text(stored.shape));
      continue;
    }
    if (rules.tied_embeddings && name == "lm_head.weight") {
      check_tied_head();
      continue;
    }
    MARROW_CHECK(rules.allow_unknown, ExitCode::kBadInput,
                 Fix("check that config.json and the weights belong together, or leave such "
                     "tensors out with --allow-unknown"),
                 "{}: tensor {} does not belong to the model of config.json", files_.path_of(name),
                 name);
    ignored_.push_back(name);
  }
}

// Some writers store a tied head again. One that differs was trained apart.
void ModelWeights::check_tied_head() const {
  const std::string head = "lm_head.weight";
  const std::string embedding = "model.embed_tokens.weight";
  const bool equal = files_.find(head)->shape == files_.find(embedding)->shape &&
                     files_.read_whole(head).equal(files_.read_whole(embedding));
  MARROW_CHECK(equal, ExitCode::kBadInput, Fix("set tie_word_embeddings to false in config.json"),
               "{}: config.json ties the embeddings, but {} differs from {}", folder_, head,
               embedding);
}

void ModelWeights::read(const HubTensor& tensor, int64_t begin, at::Tensor out) const {
  const Source& source = sources_.at(tensor.name);
  files_.read(source.stored, source.offset + begin, std::move(out));
}

void ModelWeights::read_in_parts(
    const HubTensor& tensor, at::ScalarType dtype,
    const std::function<void(int64_t, const at::Tensor&)>& visit) const {
  const at::Tensor buffer = at::empty({std::min(kPartElements, tensor.elements())}, dtype);
  for (int64_t begin = 0; begin < tensor.elements(); begin += kPartElements) {
    const at::Tensor part = buffer.narrow(0, 0, std::min(kPartElements, tensor.elements() - begin));
    read(tensor, begin, part);
    visit(begin, part);
  }
}

}  // namespace marrow
