#include "models/hub_folder.h"

#include <filesystem>
#include <set>

#include "models/config_fields.h"

namespace marrow {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kPartElements = int64_t{1} << 24;
constexpr const char *kBlocks = "_blocks", *kScales = "_scales";
const std::string kHead = "lm_head.weight", kEmbedding = "model.embed_tokens.weight";
constexpr std::string_view kModel = "model.", kLanguageModel = "model.language_model.";

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
    std::error_code unread;  // as of a name that is too long
    if (name.find('/') != std::string::npos || !fs::exists(path, unread)) {
      file.fail(fmt::format("the shard {} is missing from this folder", json_quote(name)),
                Fix("copy or download the missing shard, or repair the index"));
    }
    paths.insert(path);
  }
  return {paths.begin(), paths.end()};
}

std::string default_architecture(const Json& config) {
  const std::string type = config.at("model_type").as_string();
  if (type == "qwen3_moe") return R"(["Qwen3MoeForCausalLM"])";
  if (type == "deepseek_v2") return R"(["DeepseekV2ForCausalLM"])";
  if (type == "gpt_oss") return R"(["GptOssForCausalLM"])";
  if (type == "deepseek_v3") return R"(["DeepseekV3ForCausalLM"])";
  if (type == "qwen3_5_moe_text") return R"(["Qwen3_5MoeForCausalLM"])";
  config.at("model_type")
      .fail("no export is known for this family", Fix("use a config.json of a family that marrow trains"));
}

// RoPE in both styles: rope_theta and rope_scaling (null without any) of old, rope_parameters since transformers 5.
void decide_rope(const Json& config, std::map<std::string, std::string>& fields) {
  const Json rope = rope_parameters(config);
  const std::string type = rope.string_or("rope_type", "default");
  JsonWriter parameters, scaling;
  for (const auto& [key, value] : rope.items()) {
    if (key == "rope_type") continue;
    parameters.raw(key, value.dump());
    if (key != "rope_theta") scaling.raw(key, value.dump());
  }
  fields["rope_theta"] = rope.at("rope_theta").dump();
  if (!given(config, "rope_parameters")) fields["rope_parameters"] = parameters.field("rope_type", type).text();
  if (!given(config, "rope_scaling") && type != "default") fields["rope_scaling"] = scaling.field("type", type).text();
  if (rope.has("partial_rotary_factor")) {  // readers differ on which they take
    fields["partial_rotary_factor"] = rope.at("partial_rotary_factor").dump();
  }
}

// Fields in which the Hub's styles differ, both written, and those that an export decides; as JSON.
std::map<std::string, std::string> decided_fields(const Json& config, at::ScalarType dtype, int64_t end_of_document) {
  const std::string type = dtype == at::kBFloat16 ? "\"bfloat16\"" : "\"float32\"";
  std::map<std::string, std::string> fields{
      {"torch_dtype", type},
      {"dtype", type},
      {"tie_word_embeddings", json_text(config.bool_or("tie_word_embeddings", false))}};
  if (!given(config, "architectures")) fields["architectures"] = default_architecture(config);
  decide_rope(config, fields);
  for (const char* key : {"num_experts", "num_local_experts"}) {
    if (config.has(key)) fields["num_experts"] = fields["num_local_experts"] = config.at(key).dump();
  }
  if (config.at("model_type").as_string() == "deepseek_v3") {  // what other readers want said
    fields["scoring_func"] = "\"sigmoid\"";
    fields["topk_method"] = "\"noaux_tc\"";
  }
  // Layers that predict further tokens are not trained, and so not exported.
  for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"}) {
    if (config.has(key)) fields[key] = "0";
  }
  if (end_of_document >= 0) fields["eos_token_id"] = json_text(end_of_document);
  return fields;
}

// `object` with `fields` added or in place of its own, and without what says how its weights were quantised.
std::string with_fields(const Json& object, std::map<std::string, std::string> fields) {
  for (const auto& [key, value] : object.items()) {
    if (key != "quantization_config") fields.emplace(key, value.dump());
  }
  JsonWriter out;
  for (const auto& [key, value] : fields) out.raw(key, value);
  return out.lines();
}

// `given` (may be empty) with the end-of-document id where it names none.
std::string generation_config(const std::string& given, int64_t end_of_document) {
  const Json config = Json::parse(given.empty() ? "{\"do_sample\": false}" : given, "generation_config.json");
  if (end_of_document < 0 || config.has("eos_token_id")) return with_fields(config, {});
  return with_fields(config, {{"eos_token_id", json_text(end_of_document)}});
}

}  // namespace

ModelWeights::ModelWeights(const std::string& folder, const std::vector<HubTensor>& model, const WeightRules& rules)
    : folder_(folder), files_(weight_paths(folder)) {
  const auto within = [](const std::string& name) { return name.starts_with(kLanguageModel); };
  in_language_model_ = std::ranges::any_of(files_.names(), within);
  std::unordered_map<std::string, int64_t> used;  // elements, by name in the files
  for (const HubTensor& tensor : model) {
    const Source source = find_source(tensor);
    sources_.emplace(tensor.name, source);
    if (source.mxfp4) {
      for (const char* part : {kBlocks, kScales})
        used[tensor.name + part] = files_.find(tensor.name + part)->elements();
      continue;
    }
    const at::ScalarType dtype = files_.find(source.stored)->dtype;
    MARROW_CHECK(at::isFloatingType(dtype) && at::elementSize(dtype) > 1, ExitCode::kBadInput,
                 Fix("convert the file to F32, BF16 or F16"), "{}: tensor {} is {}, which cannot be read as weights",
                 folder_, tensor.name, dtype_name(dtype));
    used[source.stored] += tensor.elements();
  }
  check_all_used(used, rules);
}

// A stack [E, K, N] as blocks of 32 values along K, two in a byte, the lower half first: NAME_blocks [E, N, K/32, 16],
// and for each block an exponent of 2, plus 127: NAME_scales [E, N, K/32]. Source: OCP, Microscaling Formats (MX) 1.0.
bool ModelWeights::is_mxfp4(const HubTensor& tensor) const {
  if (tensor.shape.size() != 3 || files_.find(tensor.name) != nullptr) return false;
  if (files_.find(tensor.name + kBlocks) == nullptr && files_.find(tensor.name + kScales) == nullptr) return false;
  const std::vector<int64_t> scales{tensor.shape[0], tensor.shape[2], tensor.shape[1] / 32};
  for (const char* part : {kBlocks, kScales}) {
    std::vector<int64_t> shape = scales;
    if (part == kBlocks) shape.push_back(16);
    const StoredTensor* stored = files_.find(tensor.name + part);
    MARROW_CHECK(stored != nullptr, ExitCode::kBadInput, check_they_belong_together(), "{}: tensor {} is missing",
                 folder_, tensor.name + part);
    MARROW_CHECK(stored->shape == shape && stored->dtype == at::kByte && tensor.shape[1] % 32 == 0, ExitCode::kBadInput,
                 check_they_belong_together(), "{}: tensor {} is {} {} in the file, but config.json makes it U8 {}",
                 folder_, tensor.name + part, dtype_name(stored->dtype), shape_text(stored->shape), shape_text(shape));
  }
  return true;
}

// `out` = elements from `begin` of the stack [E, K, N].
void ModelWeights::read_mxfp4(const HubTensor& tensor, int64_t begin, const at::Tensor& out) const {
  const int64_t columns = tensor.shape[2], matrix = tensor.shape[1] * columns, blocks = tensor.shape[1] / 32;
  const at::Tensor values =
      at::tensor({0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0}, at::kFloat);
  const at::Tensor codes = at::empty({columns, blocks, 16}, at::kByte),
                   scales = at::empty({columns, blocks}, at::kByte);
  for (int64_t done = 0, n = 0; done < out.numel(); done += n) {  // the part in each expert
    const int64_t expert = (begin + done) / matrix, first = (begin + done) % matrix;
    n = std::min(out.numel() - done, matrix - first);
    files_.read(tensor.name + kBlocks, expert * codes.numel(), codes.view({-1}));
    files_.read(tensor.name + kScales, expert * scales.numel(), scales.view({-1}));
    const int64_t block = first / columns / 32, count = (first + n - 1) / columns / 32 + 1 - block;
    const at::Tensor pairs = codes.narrow(1, block, count).to(at::kInt), powers = scales.narrow(1, block, count);
    const at::Tensor indices = at::stack({pairs.bitwise_and(15), pairs.bitwise_right_shift(4)}, -1);
    const at::Tensor rows = values.index_select(0, indices.flatten()).view({columns, count, 32});
    const at::Tensor whole = at::ldexp(rows, powers.to(at::kInt).sub(127).unsqueeze(-1)).flatten(1).t().contiguous();
    out.narrow(0, done, n).copy_(whole.view({-1}).narrow(0, first - block * 32 * columns, n));
  }
}

// In a file of its name, or in a stack of experts: gate_up_proj [E, 2I, H] holds the rows of gate, then of up.
ModelWeights::Source ModelWeights::find_source(const HubTensor& tensor) const {
  if (is_mxfp4(tensor)) return {tensor.name, 0, true};
  constexpr std::string_view kExperts = ".experts.";
  std::string name = tensor.name;
  if (in_language_model_ && name.starts_with(kModel)) name.replace(0, kModel.size(), kLanguageModel);
  const std::string wanted = name;
  std::vector<int64_t> shape = tensor.shape;  // in the file
  int64_t expert = 0, row = 0;                // where in the stack
  const size_t number = name.find(kExperts) + kExperts.size();
  if (files_.find(name) == nullptr && number >= kExperts.size() && std::isdigit(name[number])) {
    const bool down = name.ends_with(".down_proj.weight"), up = name.ends_with(".up_proj.weight");
    expert = std::stoll(name.substr(number));
    name = name.substr(0, number) + (down ? "down_proj" : "gate_up_proj");
    row = up ? shape[0] : 0;
    shape = {expert + 1, down ? shape[0] : 2 * shape[0], shape[1]};
  }
  const StoredTensor* stored = files_.find(name);
  MARROW_CHECK(stored != nullptr, ExitCode::kBadInput, check_they_belong_together(), "{}: tensor {} is missing",
               folder_, wanted);
  // check_all_used sees whether a stack has more experts than the model.
  const bool stacked = name != wanted;
  if (stacked && stored->shape.size() == 3) shape[0] = std::max(shape[0], stored->shape[0]);
  MARROW_CHECK(stored->shape == shape, ExitCode::kBadInput, check_they_belong_together(),
               "{}: tensor {} is {} in the file, but {} makes it {}", folder_, name, shape_text(stored->shape),
               stacked ? fmt::format("expert {} of config.json", expert) : "config.json", shape_text(shape));
  return {name, stacked ? (expert * shape[1] + row) * shape[2] : 0};
}

void ModelWeights::check_all_used(const std::unordered_map<std::string, int64_t>& used, const WeightRules& rules) {
  for (const std::string& name : files_.names()) {
    if (const auto found = used.find(name); found != used.end()) {
      const StoredTensor& stored = *files_.find(name);
      MARROW_CHECK(found->second == stored.elements(), ExitCode::kBadInput, Fix("check num_experts in config.json"),
                   "{}: config.json uses {} of the {} elements of tensor {} {}", folder_, found->second,
                   stored.elements(), name, shape_text(stored.shape));
      continue;
    }
    if (rules.tied_embeddings && name == kHead) {  // some writers store it again; one that differs was trained apart
      const std::string& embedding = sources_.at(kEmbedding).stored;
      MARROW_CHECK(files_.find(name)->shape == files_.find(embedding)->shape &&
                       files_.read_whole(name).equal(files_.read_whole(embedding)),
                   ExitCode::kBadInput, Fix("set tie_word_embeddings to false in config.json"),
                   "{}: config.json ties the embeddings, but {} differs from {}", folder_, kHead, embedding);
      continue;
    }
    const bool other_part = name.starts_with("model.visual.") || name.starts_with("mtp.");
    MARROW_CHECK(!other_part || rules.text_only, ExitCode::kBadInput,
                 Fix("import the folder with --text-only, which leaves such tensors out, and go on from there"),
                 "{}: tensor {} belongs to the vision part or to the prediction of further tokens, which are not "
                 "supported",
                 folder_, name);
    MARROW_CHECK(other_part || rules.allow_unknown, ExitCode::kBadInput,
                 Fix("check that config.json and the weights belong together, or leave such "
                     "tensors out with --allow-unknown"),
                 "{}: tensor {} does not belong to the model of config.json", folder_, name);
    ignored_.push_back(name);
  }
}

void ModelWeights::read(const HubTensor& tensor, int64_t begin, at::Tensor out) const {
  const Source& source = sources_.at(tensor.name);
  if (source.mxfp4) return read_mxfp4(tensor, begin, out);
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

std::vector<SideFile> read_tokenizer_files(const std::string& folder) {
  std::vector<SideFile> files;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                           "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"}) {
    const std::string path = (fs::path(folder) / name).string();
    if (fs::exists(path)) files.push_back({name, read_text_file(path)});
  }
  return files;
}

std::string hub_config(const Json& whole, at::ScalarType dtype, int64_t end_of_document) {
  const Json config = language_model_config(whole);
  return with_fields(config, decided_fields(config, dtype, end_of_document));
}

int64_t write_hub_folder(const HubExport& to, const ModelWeights& weights) {
  check_output_is_new(to.output, "--output");
  std::vector<StoredTensor> tensors;
  for (const HubTensor& tensor : to.model) tensors.push_back({tensor, tensor.always_fp32 ? at::kFloat : to.dtype});
  std::vector<SafetensorsLayout> layouts = layout_shards("model", tensors, to.max_shard_bytes);
  if (layouts.size() == 1) layouts.front().file_name = "model.safetensors";
  int64_t total = 0;
  for (const SafetensorsLayout& layout : layouts) total += layout.file_bytes;

  StagedFolder staged(to.output, total);
  JsonWriter map;
  int64_t tensor_bytes = 0;
  for (const SafetensorsLayout& layout : layouts) {
    OutputFile file(staged.path() + "/" + layout.file_name);
    file.append(layout.header);
    for (const StoredTensor& tensor : layout.tensors) {
      weights.read_in_parts(tensor, tensor.dtype, [&](int64_t, const at::Tensor& part) {
        file.append({static_cast<const std::byte*>(part.const_data_ptr()), part.nbytes()});
      });
      map.field(tensor.name, layout.file_name);
      tensor_bytes += tensor.end - tensor.begin;
    }
    file.sync();
    file.close();
  }
  const std::string metadata = JsonWriter().field("total_size", tensor_bytes).text();
  staged.write_text("model.safetensors.index.json",
                    JsonWriter().raw("metadata", metadata).raw("weight_map", map.lines()).lines());
  staged.write_text("config.json", hub_config(to.config, to.dtype, to.end_of_document));
  for (const SideFile& file : to.tokenizer_files) staged.write_text(file.name, file.text);
  staged.write_text("generation_config.json", generation_config(to.generation_config, to.end_of_document));
  staged.publish();
  return total;
}

}  // namespace marrow
