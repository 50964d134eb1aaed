// A small Qwen3-MoE and its tensors, cut among pretend ranks, for the checkpoint tests.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <random>
#include <thread>

#include "models/model_contract.h"
#include "ops/pch.h"
#include "parallel/parameter_store.h"
#include "train/checkpoint.h"

namespace marrow {

namespace fs = std::filesystem;

// A vocabulary of 515, so that sizes do not divide by the number of ranks.
inline std::string toy_config_text(int64_t experts = 8, bool tied = false) {
  return fmt::format(R"({{"model_type": "qwen3_moe", "vocab_size": 515, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "moe_intermediate_size": 12, "num_experts": {}, "num_experts_per_tok": 2,
    "norm_topk_prob": true, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": {},
    "torch_dtype": "float32"}})",
                     experts, tied);
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "marrow-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct ToyModel {
  explicit ToyModel(OptimizerName name = OptimizerName::kAdamW, const std::string& config_text = toy_config_text())
      : optimizer(name),
        text(config_text),
        model(open_model(Json::parse(text, "toy"))),
        tensors(all_hub_tensors(*model)),
        entries(checkpoint_tensors(*model, name)) {}
  OptimizerName optimizer;
  std::string text;
  std::unique_ptr<MoeModel> model;
  std::vector<HubTensor> tensors;
  std::vector<CheckpointTensor> entries;
};

inline void add_whole_model(const MoeModel& model, ParameterStore& store) {
  store.add("embedding", model.embedding_specs());
  for (int64_t layer = 0; layer < model.shape().layers; ++layer) {
    store.add(fmt::format("layers.{}", layer), model.layer_specs(layer));
  }
  store.add("head", model.head_specs());
}

// A value that no other (tensor, element, kind, version) has nearby.
inline at::Tensor toy_values(const HubTensor& tensor, int64_t begin, int64_t end, int kind, int64_t version) {
  const double base = static_cast<double>(std::hash<std::string>{}(tensor.name) % 9973) + 0.25 * kind +
                      10007.0 * static_cast<double>(version);
  return at::arange(begin, end, at::kDouble).mul_(1.0 / 64).add_(base).to(at::kFloat);
}

// Every tensor cut at random places, the pieces dealt among `ranks`. Filled with toy_values of
// `version`, or zeros where it is negative.
inline std::vector<std::vector<OwnedRange>> cut(const ToyModel& toy, size_t ranks, unsigned seed, int64_t version,
                                                at::ScalarType state = at::kFloat) {
  std::mt19937 random(seed);
  std::vector<std::vector<OwnedRange>> owned(ranks);
  for (const CheckpointTensor& entry : toy.entries) {
    const HubTensor& tensor = entry.tensor;
    std::vector<int64_t> cuts{0, tensor.elements()};
    for (size_t i = 1; i < ranks; ++i) {
      cuts.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(tensor.elements())));
    }
    std::sort(cuts.begin(), cuts.end());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t begin = cuts[i], end = cuts[i + 1];
      const auto values = [&](int kind, at::ScalarType dtype) {
        return version < 0 ? at::zeros({end - begin}, dtype) : toy_values(tensor, begin, end, kind, version).to(dtype);
      };
      OwnedRange range{&tensor, begin, end, values(0, at::kFloat), {}, {}};
      if (entry.exp_avg) range.exp_avg = values(1, state);
      if (entry.exp_avg_sq) range.exp_avg_sq = values(2, state);
      owned[random() % ranks].push_back(range);
    }
  }
  return owned;
}

inline CheckpointContent toy_content(const ToyModel& toy, std::vector<OwnedRange> ranges, int64_t step) {
  CheckpointContent content;
  content.state.step = step;
  content.state.consumed_sequences = step * 8;
  content.state.seed = 7;
  content.state.seq_len = 32;
  content.state.corpus = "c0ffee";
  content.state.tokenizer = "bytes";
  content.state.tokenizer_hash = "b17e5";
  content.state.end_of_document = 256;
  content.state.optimizer = toy.optimizer == OptimizerName::kMuon ? "muon" : "adamw";
  content.ranges = std::move(ranges);
  content.side_files = {{"config.json", toy.text}, {"run.toml", "# a run\n"}, {"router_state.json", "{\"a\": [1]}"}};
  return content;
}

// Saves as so many ranks, each a thread.
inline void save_as_ranks(const ToyModel& toy, const std::vector<std::vector<OwnedRange>>& owned,
                          CheckpointWriterOptions options, int64_t step) {
  const int64_t ranks = static_cast<int64_t>(owned.size());
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank, options]() mutable {
      options.rank = rank;
      options.ranks = ranks;
      options.run = "run";
      Logger log;
      CheckpointWriter writer(options, toy.entries, log);
      writer.save(toy_content(toy, owned[static_cast<size_t>(rank)], step));
      writer.finish();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline void expect_filled(const std::vector<std::vector<OwnedRange>>& owned, int64_t version) {
  for (const auto& ranges : owned) {
    for (const OwnedRange& range : ranges) {
      const auto check = [&](const at::Tensor& values, int kind) {
        if (!values.defined()) return;
        const at::Tensor want = toy_values(*range.tensor, range.begin, range.end, kind, version);
        ASSERT_TRUE(values.equal(want.to(values.scalar_type()))) << range.tensor->name << " " << kind;
      };
      check(range.master, 0);
      check(range.exp_avg, 1);
      check(range.exp_avg_sq, 2);
    }
  }
}

inline void load_all(const ToyModel& toy, const Checkpoint& checkpoint,
                     const std::vector<std::vector<OwnedRange>>& owned) {
  for (const auto& ranges : owned) {
    const ModelWeights weights(checkpoint.folder(), toy.tensors,
                               {.tied_embeddings = toy.model->shape().tied_embeddings});
    for (const OwnedRange& range : ranges) weights.read(*range.tensor, range.begin, range.master);
    checkpoint.load_optimizer(ranges);
  }
}

inline std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_text_file(entry.path().string());
  }
  return files;
}

inline void flip_byte(const std::string& path, size_t at) {
  const std::byte flipped{static_cast<unsigned char>(read_text_file(path).at(at) ^ 0x10)};
  OutputFile(path, true).write_at(static_cast<int64_t>(at), {&flipped, 1});
}

// The text of the Error that `body` throws, checked for code and parts.
template <typename Body>
void expect_error(ExitCode code, std::initializer_list<const char*> parts, Body body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.report().code, code) << error.what();
    EXPECT_FALSE(error.report().fix.empty());
    for (const char* part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nlacks " << part;
    }
    return;
  }
  ADD_FAILURE() << "no error";
}

}  // namespace marrow
