#include "models/model_weights.h"

#include <filesystem>
#include <set>

#include "base/json.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

std::vector<std::string> indexed_files(const std::string& folder, const std::string& index) {
  const Json map = Json::read_file(index).at("weight_map");
  std::set<std::string> names;
  for (const auto& [tensor, file] : map.items()) {
    const std::string name = file.as_string();
    if (fs::path(name).filename() != name) {
      file.fail(json_quote(name) + " is not the name of a file beside the index",
                Fix("repair the index"));
    }
    names.insert(name);
  }
  std::vector<std::string> paths;
  for (const std::string& name : names) {
    paths.push_back((fs::path(folder) / name).string());
    MARROW_CHECK(fs::exists(paths.back()), ExitCode::kBadInput,
                 Fix("copy or download the missing shard"),
                 "{} names the shard {}, which is missing", index, paths.back());
  }
  return paths;
}

std::vector<std::string> weight_paths(const std::string& folder) {
  const std::string index = (fs::path(folder) / "model.safetensors.index.json").string();
  if (fs::exists(index)) return indexed_files(folder, index);
  std::vector<std::string> paths;
  if (fs::is_directory(folder)) {
    for (const auto& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("model") && name.ends_with(".safetensors")) {
        paths.push_back(entry.path().string());
      }
    }
  }
  std::sort(paths.begin(), paths.end());
  MARROW_CHECK(!paths.empty(), ExitCode::kBadInput,
               Fix("give a checkpoint or a Hugging Face folder with .safetensors files; convert "
                   ".bin files with transformers' save_pretrained"),
               "{} holds no model*.safetensors", folder);
  return paths;
}

// "model.layers.3.mlp.experts." + 7 + "down_proj", of a per-expert name.
struct ExpertName {
  std::string before;
  int64_t expert = 0;
  std::string projection;
};

std::optional<ExpertName> parse_expert_name(const std::string& name) {
  constexpr std::string_view kExperts = ".experts.", kWeight = ".weight";
  const size_t at = name.find(kExperts);
  if (at == std::string::npos || !name.ends_with(kWeight)) return std::nullopt;
  const size_t number = at + kExperts.size();
  const size_t dot = name.find_first_not_of("0123456789", number);
  if (dot == number || dot == std::string::npos || name[dot] != '.') return std::nullopt;
  const std::string projection = name.substr(dot + 1, name.size() - kWeight.size() - dot - 1);
  return ExpertName{name.substr(0, number), std::stoll(name.substr(number, dot - number)),
                    projection};
}

}  // namespace

ModelWeights::ModelWeights(const std::string& folder, const std::vector<HubTensor>& model,
                           const WeightRules& rules)
    : folder_(folder), files_(weight_paths(folder)) {
  find_prefix();
  std::unordered_map<std::string, int64_t> used;  // elements, by name in the files
  std::vector<std::string> missing;
  for (const HubTensor& tensor : model) {
    std::optional<Source> source = find_source(tensor);
    if (!source) {
      missing.push_back(tensor.name);
      continue;
    }
    scalar_type(*files_.find(source->stored));  // refuses dtypes that cannot be read
    used[source->stored] += tensor.elements();
    sources_.emplace(tensor.name, std::move(*source));
  }
  MARROW_CHECK(missing.empty(), ExitCode::kBadInput,
               Fix("check that config.json and the weights belong together and that no file is "
                   "missing"),
               "{}: tensor {} is missing{}", folder_, missing.front(),
               missing.size() > 1 ? fmt::format(" ({} are)", missing.size()) : "");
  check_all_used(used, rules);
}

// A wrapper around the model, or its absence, shows in the embedding's name.
void ModelWeights::find_prefix() {
  constexpr std::string_view kEmbedding = "embed_tokens.weight";
  if (files_.find("model.embed_tokens.weight") != nullptr) return;
  for (const std::string& name : files_.names()) {
    if (!name.ends_with(kEmbedding)) continue;
    prefix_ = name.substr(0, name.size() - kEmbedding.size());
    return;
  }
}

std::string ModelWeights::stored_name(const std::string& name) const {
  constexpr std::string_view kModel = "model.";
  if (name.starts_with(kModel)) return prefix_ + name.substr(kModel.size());
  if (files_.find(name) != nullptr || !prefix_.ends_with(kModel)) return name;
  return prefix_.substr(0, prefix_.size() - kModel.size()) + name;
}

std::optional<ModelWeights::Source> ModelWeights::find_source(const HubTensor& tensor) const {
  const std::string name = stored_name(tensor.name);
  const StoredTensor* stored = files_.find(name);
  if (stored == nullptr) return find_in_stack(tensor);
  MARROW_CHECK(stored->shape == tensor.shape, ExitCode::kBadInput,
               Fix("check that config.json and the weights belong together"),
               "{}: tensor {} is {} in the file, but config.json makes it {}", files_.path_of(name),
               name, shape_text(stored->shape), shape_text(tensor.shape));
  return Source{name, 0};
}

// Stacked experts: gate_up_proj [E, 2I, H] holds the rows of gate, then of up.
std::optional<ModelWeights::Source> ModelWeights::find_in_stack(const HubTensor& tensor) const {
  const std::optional<ExpertName> expert = parse_expert_name(tensor.name);
  if (!expert || tensor.shape.size() != 2) return std::nullopt;
  const bool down = expert->projection == "down_proj";
  if (!down && expert->projection != "gate_proj" && expert->projection != "up_proj") {
    return std::nullopt;
  }
  const std::string name = stored_name(expert->before + (down ? "down_proj" : "gate_up_proj"));
  const StoredTensor* stored = files_.find(name);
  if (stored == nullptr) return std::nullopt;
  const int64_t rows = tensor.shape[0], columns = tensor.shape[1];
  const int64_t stacked_rows = down ? rows : 2 * rows;
  const bool fits = stored->shape.size() == 3 && stored->shape[0] > expert->expert &&
                    stored->shape[1] == stacked_rows && stored->shape[2] == columns;
  MARROW_CHECK(fits, ExitCode::kBadInput,
               Fix("check that config.json and the weights belong together"),
               "{}: tensor {} is {}, but expert {} of config.json needs [> {}, {}, {}]",
               files_.path_of(name), name, shape_text(stored->shape), expert->expert,
               expert->expert, stacked_rows, columns);
  const int64_t first_row =
      expert->expert * stacked_rows + (expert->projection == "up_proj" ? rows : 0);
  return Source{name, first_row * columns};
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
    if (rules.tied_embeddings && name.ends_with("lm_head.weight")) {
      check_tied_head(name);
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
void ModelWeights::check_tied_head(const std::string& head) const {
  const std::string embedding = stored_name("model.embed_tokens.weight");
  const bool equal = files_.find(head)->shape == files_.find(embedding)->shape &&
                     files_.read_whole(head).equal(files_.read_whole(embedding));
  MARROW_CHECK(equal, ExitCode::kBadInput, Fix("set tie_word_embeddings to false in config.json"),
               "{}: config.json ties the embeddings, but {} differs from {}", folder_, head,
               embedding);
}

void ModelWeights::read(const HubTensor& tensor, int64_t begin, at::Tensor out) const {
  const auto found = sources_.find(tensor.name);
  MARROW_CHECK(found != sources_.end(), ExitCode::kBadInput,
               Fix("check that config.json and the weights belong together"),
               "{}: tensor {} was not among the model's when it was opened", folder_, tensor.name);
  files_.read(found->second.stored, found->second.offset + begin, std::move(out));
}

}  // namespace marrow
