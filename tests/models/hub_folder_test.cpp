#include "models/hub_folder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

namespace marrow {
namespace {

namespace fs = std::filesystem;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

constexpr int64_t kExperts = 4, kIntermediate = 3, kHidden = 5;

std::vector<HubTensor> model_tensors() {
  std::vector<HubTensor> tensors{{"model.embed_tokens.weight", {7, kHidden}}};
  for (int64_t e = 0; e < kExperts; ++e) {
    const std::string expert = fmt::format("model.layers.0.mlp.experts.{}.", e);
    tensors.push_back({expert + "gate_proj.weight", {kIntermediate, kHidden}});
    tensors.push_back({expert + "up_proj.weight", {kIntermediate, kHidden}});
    tensors.push_back({expert + "down_proj.weight", {kHidden, kIntermediate}});
  }
  tensors.push_back({"lm_head.weight", {7, kHidden}});
  return tensors;
}

// Small integers: exact in fp16 and bf16 too, and different in every element of a tensor.
NamedTensors model_values() {
  NamedTensors values;
  int64_t start = 0;
  for (const HubTensor& tensor : model_tensors()) {
    values.emplace_back(tensor.name,
                        at::arange(start, start + tensor.elements(), at::kFloat).remainder(127).view(tensor.shape));
    start += 31;
  }
  return values;
}

class HubFolderTest : public ::testing::Test {
 protected:
  HubFolderTest() {
    std::string pattern = (fs::temp_directory_path() / "marrow-hub-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~HubFolderTest() override { fs::remove_all(folder_); }

  void write_file(const std::string& name, const NamedTensors& tensors) {
    std::vector<StoredTensor> declarations;
    for (const auto& [key, value] : tensors) {
      declarations.push_back({{key, value.sizes().vec()}, value.scalar_type()});
    }
    const SafetensorsLayout layout = layout_safetensors(name, declarations);
    OutputFile file(folder_ + "/" + name);
    file.append(layout.header);
    for (const auto& [key, value] : tensors) {
      const at::Tensor bytes = value.contiguous();
      file.append({static_cast<const std::byte*>(bytes.const_data_ptr()), bytes.nbytes()});
    }
  }
  void write_text(const std::string& name, const std::string& text) {
    write_text_file_atomically(folder_ + "/" + name, text);
  }

  // Every tensor comes out as in model_values(), in whole and in a part.
  void expect_model(const WeightRules& rules = {}) {
    const std::vector<HubTensor> model = model_tensors();
    const ModelWeights weights(folder_, model, rules);
    const NamedTensors want = model_values();
    for (size_t i = 0; i < model.size(); ++i) {
      const at::Tensor flat = want[i].second.flatten();
      const at::Tensor whole = at::zeros({model[i].elements()});
      weights.read(model[i], 0, whole);
      ASSERT_TRUE(whole.equal(flat)) << model[i].name;
      const at::Tensor part = at::zeros({4});
      weights.read(model[i], 7, part);
      ASSERT_TRUE(part.equal(flat.narrow(0, 7, 4))) << model[i].name;
    }
  }
  void expect_refusal(std::initializer_list<std::string> parts, const WeightRules& rules = {},
                      std::vector<HubTensor> model = model_tensors()) {
    try {
      const ModelWeights weights(folder_, model, rules);
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kBadInput);
      for (const std::string& part : parts) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      }
      return;
    }
    ADD_FAILURE() << "accepted";
  }
  std::string folder_;
};

NamedTensors stacked(const NamedTensors& values) {
  std::vector<at::Tensor> gate_up, down;
  for (int64_t e = 0; e < kExperts; ++e) {
    const size_t first = static_cast<size_t>(1 + 3 * e);
    gate_up.push_back(at::cat({values[first].second, values[first + 1].second}));
    down.push_back(values[first + 2].second);
  }
  return {values.front(),
          {"model.layers.0.mlp.experts.down_proj", at::stack(down)},
          {"model.layers.0.mlp.experts.gate_up_proj", at::stack(gate_up)},
          values.back()};
}

TEST_F(HubFolderTest, ReadsEveryFormOfOneModel) {
  const NamedTensors values = model_values();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const bool stack : {false, true}) {
      NamedTensors form = stack ? stacked(values) : values;
      for (auto& [name, value] : form) value = value.to(dtype);
      write_file("model.safetensors", form);
      expect_model();
    }
  }
}

TEST_F(HubFolderTest, ReadsShardsByTheirIndex) {
  const NamedTensors values = model_values();
  write_file("a.safetensors", {values.begin(), values.begin() + 5});
  write_file("b.safetensors", {values.begin() + 5, values.end()});
  std::string map;
  for (size_t i = 0; i < values.size(); ++i) {
    map += fmt::format("{}\"{}\": \"{}.safetensors\"", i == 0 ? "" : ", ", values[i].first, i < 5 ? "a" : "b");
  }
  write_text("model.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
  expect_model();
  fs::remove(folder_ + "/b.safetensors");
  expect_refusal({"b.safetensors", "missing"});
  write_text("model.safetensors.index.json", R"({"weight_map": {"x": "../../etc/passwd"}})");
  expect_refusal({"../../etc/passwd"});
  fs::remove(folder_ + "/model.safetensors.index.json");
  expect_refusal({folder_, "no model*.safetensors"});
}

TEST_F(HubFolderTest, MissingUnknownAndMisshapenTensorsAreNamed) {
  const NamedTensors values = model_values();
  for (size_t i = 0; i < values.size(); ++i) {  // any one of them
    NamedTensors fewer = values;
    fewer.erase(fewer.begin() + static_cast<int64_t>(i));
    write_file("model.safetensors", fewer);
    expect_refusal({values[i].first, "missing"});
    expect_refusal({values[i].first, "missing"}, {.allow_unknown = true});
  }
  NamedTensors more = values;
  more.emplace_back("model.extra", at::zeros({2}));
  write_file("model.safetensors", more);
  expect_refusal({"model.extra", "does not belong"});
  expect_model({.allow_unknown = true});
  EXPECT_EQ(ModelWeights(folder_, model_tensors(), {.allow_unknown = true}).ignored(),
            std::vector<std::string>{"model.extra"});
  NamedTensors odd = values;
  odd[1].second = odd[1].second.t().contiguous();
  write_file("model.safetensors", odd);
  expect_refusal({odd[1].first, "[3, 5]", "[5, 3]"});
}

// Blocks of 32 along K, for each of N columns: two 4-bit values in a byte, and an exponent.
TEST_F(HubFolderTest, ReadsMxfp4Stacks) {
  constexpr int64_t kRows = 96, kColumns = 6;
  const std::vector<HubTensor> model{{"model.layers.0.mlp.experts.down_proj", {kExperts, kRows, kColumns}}};
  const std::string name = model[0].name;
  const at::Tensor blocks = at::arange(kExperts * kColumns * kRows / 2).mul(37).remainder(256).to(at::kByte);
  const at::Tensor scales = at::arange(kExperts * kColumns * kRows / 32).mul(5).remainder(40).add(110).to(at::kByte);
  const NamedTensors files{{name + "_blocks", blocks.view({kExperts, kColumns, kRows / 32, 16})},
                           {name + "_scales", scales.view({kExperts, kColumns, kRows / 32})}};
  write_file("model.safetensors", files);
  const at::Tensor want = at::empty({kExperts, kRows, kColumns});
  constexpr float kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t c = 0; c < kColumns; ++c) {
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t at = (e * kColumns + c) * kRows + r;
        const int code = blocks.data_ptr<uint8_t>()[at / 2] >> (at % 2 * 4) & 15;
        const int power = scales.data_ptr<uint8_t>()[at / 32] - 127;
        want.accessor<float, 3>()[e][r][c] = std::ldexp(code < 8 ? kValues[code] : -kValues[code - 8], power);
      }
    }
  }
  const ModelWeights weights(folder_, model, {});
  for (const auto& [begin, n] : {std::pair<int64_t, int64_t>{0, want.numel()}, {7, 1}, {200, 900}, {570, 10}}) {
    const at::Tensor part = at::full({n}, NAN);
    weights.read(model[0], begin, part);
    EXPECT_TRUE(part.equal(want.flatten().narrow(0, begin, n))) << begin;
  }
  write_file("model.safetensors", {files[0]});
  expect_refusal({name + "_scales", "missing"}, {}, model);
  write_file("model.safetensors", {files[0], {files[1].first, files[1].second.to(at::kFloat)}});
  expect_refusal({name + "_scales", "U8", "F32"}, {}, model);
  write_file("model.safetensors", {files[0], {files[1].first, files[1].second.slice(1, 0, 5).contiguous()}});
  expect_refusal({name + "_scales", "[4, 5, 3]", "[4, 6, 3]"}, {}, model);
}

// A stack of more experts than the config has would otherwise lose the rest in silence.
TEST_F(HubFolderTest, StacksMustFitTheConfigExactly) {
  write_file("model.safetensors", stacked(model_values()));
  std::vector<HubTensor> fewer = model_tensors();
  fewer.erase(fewer.end() - 4, fewer.end() - 1);  // expert 3
  expect_refusal({"experts", "elements", "[4, "}, {}, fewer);
  std::vector<HubTensor> more = model_tensors();
  more.push_back({"model.layers.0.mlp.experts.4.down_proj.weight", {kHidden, kIntermediate}});
  expect_refusal({"down_proj", "[4, 5, 3]", "expert 4"}, {}, more);
}

TEST_F(HubFolderTest, ATiedHeadMayBeStoredAgainButNotDiffer) {
  NamedTensors values = model_values();
  std::vector<HubTensor> tied = model_tensors();
  tied.pop_back();
  values.back().second = values.front().second;
  write_file("model.safetensors", values);
  EXPECT_NO_THROW(ModelWeights(folder_, tied, {.tied_embeddings = true}));
  expect_refusal({"lm_head.weight", "does not belong"}, {}, tied);
  values.back().second = values.front().second + 1;
  write_file("model.safetensors", values);
  expect_refusal({"lm_head.weight", "differs"}, {.tied_embeddings = true}, tied);
}

TEST_F(HubFolderTest, ExportIsReadBackWholeInOneFileAndInShards) {
  write_file("model.safetensors", stacked(model_values()));
  const std::vector<HubTensor> model = model_tensors();
  const Json config = Json::parse(R"({"model_type": "qwen3_moe", "num_experts": 4,
      "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "head_dim": 8})",
                                  "config");
  const std::string source = folder_;
  for (const int64_t shard : {int64_t{5'000'000'000}, int64_t{200}}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const std::string output = source + "/out";
      const ModelWeights weights(source, model, {});
      HubExport to{.output = output, .config = config, .model = model, .dtype = dtype};
      to.end_of_document = 256;
      to.tokenizer_files = {{"tokenizer.json", "as it is"}};
      to.max_shard_bytes = shard;
      write_hub_folder(to, weights);
      folder_ = output;
      expect_model();
      folder_ = source;
      EXPECT_EQ(fs::exists(output + "/model.safetensors"), shard > 200);
      EXPECT_THROW(write_hub_folder(to, weights), Error);  // nothing is written over
      const Json map = Json::read_file(output + "/model.safetensors.index.json").at("weight_map");
      EXPECT_EQ(map.size(), model.size());
      EXPECT_EQ(read_tokenizer_files(output).at(0).text, "as it is");
      fs::remove_all(output);
    }
  }
}

TEST_F(HubFolderTest, ExportedConfigCarriesBothStyles) {
  const Json old = Json::parse(R"({"model_type": "qwen3_moe", "num_experts": 8, "head_dim": 128,
      "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": true})",
                               "old");
  const Json current = Json::parse(R"({"model_type": "qwen3_moe", "num_local_experts": 8,
      "head_dim": 128, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
      "dtype": "bfloat16", "tie_word_embeddings": true, "eos_token_id": 3})",
                                   "new");
  for (const Json& config : {old, current}) {
    const Json both = Json::parse(hub_config(config, at::kFloat, 256), "export");
    EXPECT_EQ(both.at("rope_theta").as_double(), 1e6);
    EXPECT_EQ(both.at("rope_parameters").at("rope_theta").as_double(), 1e6);
    EXPECT_EQ(both.at("rope_parameters").at("rope_type").as_string(), "default");
    EXPECT_EQ(both.at("num_experts").as_int(), 8);
    EXPECT_EQ(both.at("num_local_experts").as_int(), 8);
    EXPECT_EQ(both.at("torch_dtype").as_string(), "float32");
    EXPECT_EQ(both.at("dtype").as_string(), "float32");
    EXPECT_EQ(both.at("eos_token_id").as_int(), 256);
    EXPECT_EQ(both.at("head_dim").as_int(), 128);
    EXPECT_TRUE(both.at("tie_word_embeddings").as_bool());
    EXPECT_EQ(both.at("architectures").at(size_t{0}).as_string(), "Qwen3MoeForCausalLM");
  }
  // YaRN of old: what scales positions, and no word of how the weights were quantised.
  const Json yarn = Json::parse(R"({"model_type": "gpt_oss", "num_local_experts": 8, "rope_theta": 150000,
      "rope_scaling": {"type": "yarn", "factor": 32.0}, "quantization_config": {"quant_method": "mxfp4"}})",
                                "yarn");
  const Json exported = Json::parse(hub_config(yarn, at::kFloat, -1), "export");
  EXPECT_EQ(exported.at("rope_parameters").at("rope_type").as_string(), "yarn");
  EXPECT_EQ(exported.at("rope_parameters").at("rope_theta").as_double(), 150000);
  EXPECT_EQ(exported.at("rope_parameters").at("factor").as_double(), 32);
  EXPECT_EQ(exported.at("architectures").at(size_t{0}).as_string(), "GptOssForCausalLM");
  EXPECT_FALSE(exported.has("quantization_config"));
  const Json without = Json::parse(R"({"model_type": "qwen3_moe", "num_experts": 8})", "no base");
  EXPECT_THROW(hub_config(without, at::kFloat, -1), Error);  // never a default in silence
}

}  // namespace
}  // namespace marrow
