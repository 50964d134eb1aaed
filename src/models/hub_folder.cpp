#include "models/hub_folder.h"

#include <filesystem>

namespace marrow {
namespace fs = std::filesystem;
namespace {

std::string default_architecture(const Json& config) {
  const std::string type = config.at("model_type").as_string();
  if (type == "qwen3_moe") return R"(["Qwen3MoeForCausalLM"])";
  config.at("model_type")
      .fail("no export is known for this family", Fix("use a config.json of model_type \"qwen3_moe\""));
}

// Fields in which the Hub's styles differ, both written, and those that an export decides; as JSON.
std::map<std::string, std::string> decided_fields(const Json& config, at::ScalarType dtype, int64_t end_of_document) {
  const Json theta = config.has("rope_theta") ? config.at("rope_theta") : config.at("rope_parameters").at("rope_theta");
  const std::string experts = config.at(config.has("num_experts") ? "num_experts" : "num_local_experts").dump();
  const std::string type = dtype == at::kBFloat16 ? "\"bfloat16\"" : "\"float32\"";
  std::map<std::string, std::string> fields{
      {"architectures", config.has("architectures") ? config.at("architectures").dump() : default_architecture(config)},
      {"rope_theta", theta.dump()},
      {"num_experts", experts},
      {"num_local_experts", experts},
      {"torch_dtype", type},
      {"dtype", type},
      {"tie_word_embeddings", json_text(config.bool_or("tie_word_embeddings", false))}};
  if (!config.has("rope_parameters") || config.at("rope_parameters").is_null()) {
    fields["rope_parameters"] = JsonWriter().raw("rope_theta", theta.dump()).field("rope_type", "default").text();
  }
  if (end_of_document >= 0) fields["eos_token_id"] = json_text(end_of_document);
  return fields;
}

// `object` with `fields` in place of its own or added at its end.
std::string with_fields(const Json& object, std::map<std::string, std::string> fields) {
  JsonWriter out;
  for (const auto& [key, value] : object.items()) {
    const auto field = fields.extract(key);
    out.raw(key, field ? field.mapped() : value.dump());
  }
  for (const auto& [key, value] : fields) out.raw(key, value);
  return out.lines();
}

std::vector<SafetensorsLayout> export_layouts(const HubExport& to) {
  std::vector<StoredTensor> tensors;
  for (const HubTensor& tensor : to.model) tensors.push_back({tensor, to.dtype});
  std::vector<SafetensorsLayout> layouts = layout_shards("model", tensors, to.max_shard_bytes);
  if (layouts.size() == 1) layouts.front().file_name = "model.safetensors";
  return layouts;
}

std::string index_json(const std::vector<SafetensorsLayout>& layouts) {
  JsonWriter map;
  int64_t total = 0;
  for (const SafetensorsLayout& layout : layouts) {
    for (const StoredTensor& tensor : layout.tensors) {
      map.field(tensor.name, layout.file_name);
      total += tensor.end - tensor.begin;
    }
  }
  return JsonWriter()
      .raw("metadata", JsonWriter().field("total_size", total).text())
      .raw("weight_map", map.lines())
      .lines();
}

// `given` (may be empty) with the end-of-document id where it names none.
std::string generation_config(const std::string& given, int64_t end_of_document) {
  const Json config = Json::parse(given.empty() ? "{\"do_sample\": false}" : given, "generation_config.json");
  if (end_of_document < 0 || config.has("eos_token_id")) return with_fields(config, {});
  return with_fields(config, {{"eos_token_id", json_text(end_of_document)}});
}

}  // namespace

std::vector<SideFile> read_tokenizer_files(const std::string& folder) {
  std::vector<SideFile> files;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                           "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"}) {
    const std::string path = (fs::path(folder) / name).string();
    if (fs::exists(path)) files.push_back({name, read_text_file(path)});
  }
  return files;
}

std::string hub_config(const Json& config, at::ScalarType dtype, int64_t end_of_document) {
  return with_fields(config, decided_fields(config, dtype, end_of_document));
}

int64_t write_hub_folder(const HubExport& to, const ModelWeights& weights) {
  check_output_is_new(to.output, "--output");
  const std::vector<SafetensorsLayout> layouts = export_layouts(to);
  int64_t total = 0;
  for (const SafetensorsLayout& layout : layouts) total += layout.file_bytes;

  StagedFolder staged(to.output, total);
  auto tensor = to.model.begin();  // the layouts hold the model's tensors in its order
  for (const SafetensorsLayout& layout : layouts) {
    OutputFile file(staged.path() + "/" + layout.file_name);
    file.append(layout.header);
    for (size_t i = 0; i < layout.tensors.size(); ++i) {
      weights.read_in_parts(*tensor++, to.dtype, [&](int64_t, const at::Tensor& part) {
        file.append({static_cast<const std::byte*>(part.const_data_ptr()), part.nbytes()});
      });
    }
    file.sync();
    file.close();
  }
  staged.write_text("model.safetensors.index.json", index_json(layouts));
  staged.write_text("config.json", hub_config(to.config, to.dtype, to.end_of_document));
  for (const SideFile& file : to.tokenizer_files) staged.write_text(file.name, file.text);
  staged.write_text("generation_config.json", generation_config(to.generation_config, to.end_of_document));
  staged.publish();
  return total;
}

}  // namespace marrow
