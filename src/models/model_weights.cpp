#include "models/model_weights.h"

#include <filesystem>
#include <set>

#include "base/json.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kPartElements = int64_t{1} << 24;

Fix check_they_belong_together() {
  return Fix("check that config.json and the weights belong together and that no file is missing");
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

ModelWeights::ModelWeights(const std::string& folder, const std::vector<HubTensor>& model, const WeightRules& rules)
    : folder_(folder), files_(weight_paths(folder)) {
  std::unordered_map<std::string, int64_t> used;  // elements, by name in the files
  for (const HubTensor& tensor : model) {
    const std::optional<Source> source = find_source(tensor);
    MARROW_CHECK(source.has_value(), ExitCode::kBadInput, check_they_belong_together(), "{}: tensor {} is missing",
                 folder_, tensor.name);
    const at::ScalarType dtype = files_.find(source->stored)->dtype;
    MARROW_CHECK(at::isFloatingType(dtype) && at::elementSize(dtype) > 1, ExitCode::kBadInput,
                 Fix("convert the file to F32, BF16 or F16"), "{}: tensor {} is {}, which cannot be read as weights",
                 folder_, tensor.name, dtype_name(dtype));
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
               "{}: tensor {} is {} in the file, but config.json makes it {}", folder_, name, shape_text(stored->shape),
               shape_text(tensor.shape));
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
  const bool fits = stored->shape.size() == 3 && stored->shape[0] > expert && stored->shape[1] == stacked_rows &&
                    stored->shape[2] == columns;
  MARROW_CHECK(fits, ExitCode::kBadInput, check_they_belong_together(),
               "{}: tensor {} is {}, but expert {} of config.json needs [> {}, {}, {}]", folder_, name,
               shape_text(stored->shape), expert, expert, stacked_rows, columns);
  const bool up = tensor.name.ends_with(".up_proj.weight");
  return Source{name, (expert * stacked_rows + (up ? rows : 0)) * columns};
}

void ModelWeights::check_all_used(const std::unordered_map<std::string, int64_t>& used, const WeightRules& rules) {
  for (const std::string& name : files_.names()) {
    const auto found = used.find(name);
    if (found != used.end()) {
      const StoredTensor& stored = *files_.find(name);
      MARROW_CHECK(found->second == stored.elements(), ExitCode::kBadInput, Fix("check num_experts in config.json"),
                   "{}: config.json uses {} of the {} elements of tensor {} {}", folder_, found->second,
                   stored.elements(), name, shape_text(stored.shape));
      continue;
    }
    if (rules.tied_embeddings && name == "lm_head.weight") {
      check_tied_head();
      continue;
    }
    MARROW_CHECK(rules.allow_unknown, ExitCode::kBadInput,
                 Fix("check that config.json and the weights belong together, or leave such "
                     "tensors out with --allow-unknown"),
                 "{}: tensor {} does not belong to the model of config.json", folder_, name);
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
               "{}: config.json ties the embeddings, but {} differs from {}", folder_, head, embedding);
}

void ModelWeights::read(const HubTensor& tensor, int64_t begin, at::Tensor out) const {
  const Source& source = sources_.at(tensor.name);
  files_.read(source.stored, source.offset + begin, std::move(out));
}

void ModelWeights::read_in_parts(const HubTensor& tensor, at::ScalarType dtype,
                                 const std::function<void(int64_t, const at::Tensor&)>& visit) const {
  const at::Tensor buffer = at::empty({std::min(kPartElements, tensor.elements())}, dtype);
  for (int64_t begin = 0; begin < tensor.elements(); begin += kPartElements) {
    const at::Tensor part = buffer.narrow(0, 0, std::min(kPartElements, tensor.elements() - begin));
    read(tensor, begin, part);
    visit(begin, part);
  }
}

}  // namespace marrow
