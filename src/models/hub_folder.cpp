#include "models/hub_folder.h"

#include <filesystem>

#include "base/staged_folder.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kWriteElements = int64_t{1} << 24;
constexpr std::string_view kEndOfText = "<|endoftext|>";

// GPT-2's byte alphabet: printable Latin-1 stands for itself, every other byte, in order, for the
// characters from U+0100 on.
std::string byte_character(int byte, int& next) {
  const bool printable =
      (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
  const int code = printable ? byte : next++;
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
}

std::string bytes_tokenizer_json() {
  std::string vocab;
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    vocab += fmt::format("{}{}: {}", byte == 0 ? "" : ", ", json_quote(byte_character(byte, next)),
                         byte);
  }
  return fmt::format(R"({{
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "added_tokens": [
    {{"id": 256, "content": "{0}", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}}
  ],
  "normalizer": null,
  "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}},
  "post_processor": null,
  "decoder": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}},
  "model": {{
    "type": "BPE",
    "dropout": null,
    "unk_token": null,
    "continuing_subword_prefix": null,
    "end_of_word_suffix": null,
    "fuse_unk": false,
    "byte_fallback": false,
    "ignore_merges": false,
    "vocab": {{{1}}},
    "merges": []
  }}
}}
)",
                     kEndOfText, vocab);
}

std::string bytes_tokenizer_config() {
  return fmt::format(R"({{
  "tokenizer_class": "PreTrainedTokenizerFast",
  "eos_token": "{0}",
  "clean_up_tokenization_spaces": false,
  "model_max_length": 1000000000
}}
)",
                     kEndOfText);
}

// JSON objects with one entry a line, as the Hub's own files are.
class IndentedObject {
 public:
  void add(std::string_view key, std::string_view json) {
    body_ += fmt::format("{}\n  {}: {}", body_.empty() ? "" : ",", json_quote(key), json);
  }
  std::string text() const { return "{" + body_ + "\n}\n"; }

 private:
  std::string body_;
};

std::string default_architecture(const Json& config) {
  const std::string type = config.at("model_type").as_string();
  if (type == "qwen3_moe") return R"(["Qwen3MoeForCausalLM"])";
  config.at("model_type")
      .fail("no export is known for this family",
            Fix("use a config.json of model_type \"qwen3_moe\""));
}

// Fields in which the Hub's styles differ, both written, and those that an export decides.
std::vector<std::pair<std::string, std::string>> decided_fields(const Json& config,
                                                                TensorDtype dtype,
                                                                int64_t end_of_document) {
  const Json theta = config.has("rope_theta") ? config.at("rope_theta")
                                              : config.at("rope_parameters").at("rope_theta");
  const std::string experts =
      config.at(config.has("num_experts") ? "num_experts" : "num_local_experts").dump();
  const std::string type = dtype == TensorDtype::kBF16 ? "\"bfloat16\"" : "\"float32\"";
  std::vector<std::pair<std::string, std::string>> fields{
      {"architectures", config.has("architectures") ? config.at("architectures").dump()
                                                    : default_architecture(config)},
      {"rope_theta", theta.dump()},
      {"num_experts", experts},
      {"num_local_experts", experts},
      {"torch_dtype", type},
      {"dtype", type},
      {"tie_word_embeddings", config.bool_or("tie_word_embeddings", false) ? "true" : "false"}};
  if (!config.has("rope_parameters") || config.at("rope_parameters").is_null()) {
    fields.emplace_back(
        "rope_parameters",
        JsonWriter().raw("rope_theta", theta.dump()).field("rope_type", "default").text());
  }
  if (end_of_document >= 0) fields.emplace_back("eos_token_id", fmt::format("{}", end_of_document));
  return fields;
}

void write_tensor(OutputFile& file, const StoredTensor& place, const HubTensor& tensor,
                  const ModelWeights& weights) {
  const int64_t width = byte_width(place.dtype);
  const at::Tensor buffer =
      at::empty({std::min(kWriteElements, tensor.elements())},
                place.dtype == TensorDtype::kBF16 ? at::kBFloat16 : at::kFloat);
  for (int64_t done = 0; done < tensor.elements(); done += kWriteElements) {
    const int64_t n = std::min(kWriteElements, tensor.elements() - done);
    weights.read(tensor, done, buffer.narrow(0, 0, n));
    file.write_at(
        place.begin + done * width,
        {static_cast<const std::byte*>(buffer.const_data_ptr()), static_cast<size_t>(n * width)});
  }
}

std::vector<SafetensorsLayout> export_layouts(const HubExport& to) {
  std::vector<TensorDeclaration> declarations;
  for (const HubTensor& tensor : to.model) {
    declarations.push_back({tensor.name, to.dtype, tensor.shape});
  }
  std::vector<SafetensorsLayout> layouts = layout_shards("model", declarations, to.max_shard_bytes);
  if (layouts.size() == 1) layouts.front().file_name = "model.safetensors";
  return layouts;
}

std::string index_json(const std::vector<SafetensorsLayout>& layouts) {
  IndentedObject map;
  int64_t total = 0;
  for (const SafetensorsLayout& layout : layouts) {
    for (const StoredTensor& tensor : layout.tensors) {
      map.add(tensor.name, json_quote(layout.file_name));
      total += tensor.end - tensor.begin;
    }
  }
  IndentedObject index;
  index.add("metadata", JsonWriter().field("total_size", total).text());
  index.add("weight_map", map.text());
  return index.text();
}

// generation_config.json: `given` (may be empty) with the end-of-document id where it names none.
std::string generation_config(const std::string& given, int64_t end_of_document) {
  const Json config =
      Json::parse(given.empty() ? "{\"do_sample\": false}" : given, "generation_config.json");
  IndentedObject object;
  for (const auto& [key, value] : config.items()) object.add(key, value.dump());
  if (end_of_document >= 0 && !config.has("eos_token_id")) {
    object.add("eos_token_id", fmt::format("{}", end_of_document));
  }
  return object.text();
}

}  // namespace

std::vector<SideFile> read_tokenizer_files(const std::string& folder) {
  std::vector<SideFile> files;
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"}) {
    const std::string path = (fs::path(folder) / name).string();
    if (fs::exists(path)) files.push_back({name, read_text_file(path)});
  }
  return files;
}

std::vector<SideFile> bytes_tokenizer_files() {
  return {{"tokenizer.json", bytes_tokenizer_json()},
          {"tokenizer_config.json", bytes_tokenizer_config()}};
}

bool is_bytes_tokenizer(const std::vector<SideFile>& files) {
  return std::any_of(files.begin(), files.end(), [](const SideFile& file) {
    return file.name == "tokenizer.json" && file.text == bytes_tokenizer_json();
  });
}

std::string hub_config(const Json& config, TensorDtype dtype, int64_t end_of_document) {
  const auto decided = decided_fields(config, dtype, end_of_document);
  const auto find = [&](const std::string& key) {
    return std::find_if(decided.begin(), decided.end(),
                        [&](const auto& f) { return f.first == key; });
  };
  IndentedObject object;
  for (const auto& [key, value] : config.items()) {
    const auto field = find(key);
    object.add(key, field == decided.end() ? value.dump() : field->second);
  }
  for (const auto& [key, value] : decided) {
    if (!config.has(key)) object.add(key, value);
  }
  return object.text();
}

int64_t write_hub_folder(const HubExport& to, const ModelWeights& weights) {
  check_output_is_new(to.output, "--output");
  const std::vector<SafetensorsLayout> layouts = export_layouts(to);
  std::map<std::string, const HubTensor*> by_name;
  for (const HubTensor& tensor : to.model) by_name[tensor.name] = &tensor;
  int64_t total = 0;
  for (const SafetensorsLayout& layout : layouts) total += layout.file_bytes;

  StagedFolder staged(to.output, total);
  for (const SafetensorsLayout& layout : layouts) {
    OutputFile file((fs::path(staged.path()) / layout.file_name).string());
    file.append(std::as_bytes(std::span(layout.header.data(), layout.header.size())));
    for (const StoredTensor& place : layout.tensors) {
      write_tensor(file, place, *by_name.at(place.name), weights);
    }
    file.sync();
    file.close();
  }
  staged.write_text("model.safetensors.index.json", index_json(layouts));
  staged.write_text("config.json", hub_config(to.config, to.dtype, to.end_of_document));
  for (const SideFile& file : to.tokenizer_files) staged.write_text(file.name, file.text);
  staged.write_text("generation_config.json",
                    generation_config(to.generation_config, to.end_of_document));
  staged.publish();
  return total;
}

}  // namespace marrow
