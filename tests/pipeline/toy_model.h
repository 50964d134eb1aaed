// The rig of tests: a small Qwen3-MoE in one process, and steps on fixed batches.
#pragma once
#include <gtest/gtest.h>

#include "pipeline/executor.h"
#include "pipeline/model_setup.h"

namespace marrow::test {

inline std::string toy_config(int64_t layers = 4, bool tied = false, int64_t top_k = 2) {
  return fmt::format(
      R"({{"model_type": "qwen3_moe", "num_hidden_layers": {}, "hidden_size": 64,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
          "num_experts_per_tok": {}, "moe_intermediate_size": 48, "intermediate_size": 96,
          "vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
          "rope_theta": 1000000.0, "norm_topk_prob": true, "tie_word_embeddings": {},
          "initializer_range": 0.05}})",
      layers, top_k, tied);
}

struct ToyOptions {
  BalanceMode balance = BalanceMode::kNone;
  double coef = 0.0;
  double z_loss = 0.0;
  bool recompute = false;
  bool recompute_cheap = false;
  at::ScalarType dtype = at::kFloat;
  bool tied = false;
  bool by_layer = false;
  bool fp8 = false;
  int64_t top_k = 2;
  int64_t layers = 4;
  int64_t seed = 1;
};

class ToyModel {
 public:
  explicit ToyModel(const ToyOptions& options)
      : model_(
            open_model(Json::parse(toy_config(options.layers, options.tied, options.top_k), "toy", ExitCode::kUsage))),
        store_(storage(options)),
        tracker_(model_->shape(), {options.balance, options.coef, options.z_loss}, at::kCPU) {
    add_model_parameters(*model_, {}, store_);
    store_.initialize(options.seed);
    Executor::Options executor;
    executor.recompute_layers = options.recompute;
    executor.recompute_cheap = options.recompute_cheap;
    executor_.emplace(*model_, ModelParts{}, store_, &tracker_, executor);
  }

  // One accumulation over `sequences` (tokens and targets [B][S]) in micro-batches; gradients stay
  // in the store. Returns the loss: mean over all targets.
  double accumulate(const std::vector<std::vector<int32_t>>& tokens, const std::vector<std::vector<int32_t>>& targets,
                    int64_t micro_batch, double loss_weight = 1.0) {
    const int64_t sequences = static_cast<int64_t>(tokens.size());
    const int64_t length = static_cast<int64_t>(tokens[0].size());
    int64_t valid = 0;
    for (const auto& row : targets) {
      valid += std::count_if(row.begin(), row.end(), [](int32_t t) { return t >= 0; });
    }
    const at::Tensor sum = at::zeros({1}, at::kDouble);
    tracker_.begin_step({sequences * length, sequences, sequences / micro_batch});
    const auto load = [&](int64_t index) {
      std::vector<int32_t> flat_tokens, flat_targets;
      for (int64_t s = index * micro_batch; s < (index + 1) * micro_batch; ++s) {
        flat_tokens.insert(flat_tokens.end(), tokens[s].begin(), tokens[s].end());
        flat_targets.insert(flat_targets.end(), targets[s].begin(), targets[s].end());
      }
      const std::vector<int32_t> starts(flat_tokens.size(), 0);
      return make_micro_batch(flat_tokens, flat_targets, starts, micro_batch, length, false, at::kCPU);
    };
    executor_->train(sequences / micro_batch, load, valid > 0 ? loss_weight / static_cast<double>(valid) : 0.0, sum);
    tracker_.end_step();
    return valid > 0 ? sum.item<double>() / static_cast<double>(valid) : 0.0;
  }

  const Parameter& parameter(const std::string& name) const { return store_.table().at(name); }
  at::Tensor all_gradients() {
    std::vector<at::Tensor> flat;
    for (const FlatGroup& group : store_.groups()) flat.push_back(group.grad);
    return at::cat(flat);
  }
  void zero_gradients() {
    for (FlatGroup& group : store_.groups()) group.grad.zero_();
  }

  const MoeModel& model() const { return *model_; }
  ParameterStore& store() { return store_; }
  BalanceTracker& tracker() { return tracker_; }
  Executor& executor() { return *executor_; }

 private:
  static ParameterStore::Options storage(const ToyOptions& options) {
    ParameterStore::Options storage;
    storage.by_layer = options.by_layer;
    storage.fp8 = options.fp8;
    storage.working_dtype = options.dtype;
    return storage;
  }

  std::unique_ptr<MoeModel> model_;
  ParameterStore store_;
  BalanceTracker tracker_;
  std::optional<Executor> executor_;
};

inline std::vector<std::vector<int32_t>> random_tokens(int64_t sequences, int64_t length, uint64_t seed,
                                                       int32_t vocab = 512) {
  std::vector<std::vector<int32_t>> rows(sequences, std::vector<int32_t>(length));
  for (auto& row : rows) {
    for (int32_t& token : row) {
      seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
      token = static_cast<int32_t>((seed >> 33) % static_cast<uint64_t>(vocab));
    }
  }
  return rows;
}

// Next-token targets; the last of each sequence is given.
inline std::vector<std::vector<int32_t>> shifted(std::vector<std::vector<int32_t>> tokens) {
  for (auto& row : tokens) {
    row.erase(row.begin());
    row.push_back(7);
  }
  return tokens;
}

inline double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

}  // namespace marrow::test
