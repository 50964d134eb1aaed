#include "mesh/mesh_runs.h"

#include <cmath>
#include <fstream>

#include "base/files.h"
#include "base/json.h"
#include "data/indexed_corpus.h"
#include "models/hub_folder.h"
#include "models/safetensors.h"
#include "ops/pch.h"
#include "parallel/bootstrap.h"
#include "train/checkpoint_files.h"
#include "train/pretrain_loop.h"

namespace marrow::test {

std::string Setting::model_text() const {
  constexpr const char* balances[] = {"none", "micro", "sequence", "global", "bias"};
  return fmt::format("{} {}{}{}{}{}{}", optimizer == OptimizerName::kMuon ? "muon" : "adamw",
                     balances[static_cast<size_t>(balance)], tied ? " tied" : "", documents ? " documents" : "",
                     experts.empty() ? "" : fmt::format(" on {}-{}", experts.front(), experts.back()),
                     family == "qwen3_moe" ? "" : " " + family, fp8 ? " fp8" : "");
}

std::string Setting::text() const {
  constexpr const char* recomputed[] = {"", " recompute-cheap", " recompute-layer"};
  return fmt::format("pp{} dp{} cp{} ep{}{} {}{}{}{}{}{}", mesh.pp, mesh.dp, mesh.cp, mesh.ep,
                     mesh.replicate > 1 ? fmt::format(" replicate{}", mesh.replicate) : "", model_text(),
                     schedule == PipelineSchedule::kOneFOneB ? " 1f1b" : "", overlap ? "" : " no-overlap",
                     by_layer ? " shard-layer" : "", micro_batch > 1 ? " micro-batch2" : "",
                     recomputed[static_cast<size_t>(recompute)]);
}

namespace {

std::string gpt_oss_config(const Setting& setting) {
  std::string types;
  for (int64_t i = 0; i < setting.layers(); ++i) {
    types += fmt::format("{}\"{}_attention\"", i == 0 ? "" : ", ", i % 2 == 0 ? "sliding" : "full");
  }
  return fmt::format(
      R"({{"model_type": "gpt_oss", "num_hidden_layers": {}, "hidden_size": 64, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48,
"vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 10,
"rope_scaling": {{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": false}},
"attention_bias": true, "layer_types": [{}], "tie_word_embeddings": {}, "initializer_range": 0.05}})",
      setting.layers(), types, setting.tied);
}

// DeltaNet layers, and every second one with full attention. The norms' eps is as large as it is because states' first
// outputs may be all but 0; heads are many, so that some forget slowly and their decays have gradients that count.
std::string qwen3_5_config(const Setting& setting) {
  return fmt::format(
      R"({{"model_type": "qwen3_5_moe_text", "num_hidden_layers": {}, "hidden_size": 64, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
"shared_expert_intermediate_size": 40, "linear_num_key_heads": 4, "linear_num_value_heads": 16, "linear_key_head_dim": 8,
"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "vocab_size": 512,
"max_position_embeddings": 256, "rms_norm_eps": 1e-3, "rope_parameters": {{"rope_type": "default", "rope_theta": 1000000.0,
"partial_rotary_factor": 0.25}}, "tie_word_embeddings": {}, "initializer_range": 0.05}})",
      setting.layers(), setting.tied);
}

std::string model_config(const Setting& setting) {
  if (setting.family == "gpt_oss") return gpt_oss_config(setting);
  if (setting.family == "qwen3_5_moe_text") return qwen3_5_config(setting);
  if (setting.family != "qwen3_moe") {  // latent attention, a dense layer, shared experts, groups of experts
    return fmt::format(
        R"({{"model_type": "{}", "num_hidden_layers": {}, "hidden_size": 64, "num_attention_heads": 4, "q_lora_rank": 24,
"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 96,
"first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4,
"topk_group": 2, "topk_method": "{}", "norm_topk_prob": {}, "routed_scaling_factor": 1.5, "moe_intermediate_size": 48,
"vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": {{"type":
"yarn", "factor": 8, "original_max_position_embeddings": 32, "mscale": 1, "mscale_all_dim": 0.7}},
"initializer_range": 0.05}})",
        setting.family, setting.layers(), setting.family == "deepseek_v3" ? "noaux_tc" : "group_limited_greedy",
        setting.family == "deepseek_v3");
  }
  return fmt::format(
      R"({{"model_type": "qwen3_moe", "num_hidden_layers": {}, "hidden_size": 64, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
"vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
"norm_topk_prob": true, "tie_word_embeddings": {}, "initializer_range": 0.05}})",
      setting.layers(), setting.tied);
}

}  // namespace

PretrainConfig run_config(const std::string& root, const std::string& name, const Setting& setting) {
  PretrainConfig config;
  config.model.config =
      fmt::format("{}/model-{}-{}-{}.json", root, setting.family, setting.layers(), setting.tied ? "tied" : "untied");
  config.data.train = {{root + "/corpus", 1.0}};
  config.data.validation = {root + "/corpus"};
  config.data.validate_sequences = 5;  // divides by no number of ranks
  config.data.seq_len = 32;
  config.data.mask_documents = setting.documents;
  static_cast<MeshShape&>(config.mesh) = setting.mesh;
  config.mesh.schedule = setting.schedule;
  config.train.steps = setting.steps;
  config.train.global_batch = setting.sequences();
  config.train.micro_batch = setting.micro_batch;
  config.train.deterministic = setting.deterministic;
  config.train.seed = setting.seed;
  config.train.cpu_threads = 1;
  if (setting.gpu) config.train.device = TrainDevice::kGpu;
  config.train.overlap = setting.overlap;
  if (setting.by_layer) config.mesh.shard = ShardMode::kLayer;
  config.train.recompute = setting.recompute;
  if (setting.fp8) config.train.dtype = TrainDtype::kFp8;
  config.train.fp8_at_any_size = setting.fp8;
  config.optimizer.name = setting.optimizer;
  config.optimizer.lr = 2e-3;
  config.optimizer.eps = 1e-3;  // a smaller one turns the first step into a sign, and hides scales
  config.router.balance = setting.balance;
  config.router.coef = 0.05;
  config.router.z_loss = 1e-3;
  config.checkpoint.async = false;
  config.log.dir = root + "/" + name;
  config.checkpoint.dir = config.log.dir + "/checkpoints";
  config.log.watchdog_seconds = 60;
  return config;
}

void run(const PretrainConfig& config, Bootstrap& bootstrap) {
  Logger logger;
  logger.set_quiet(true);
  StopSignal stop;
  RunRecords records(/*json=*/false);
  PretrainLoop loop(config, bootstrap, records, logger);
  loop.run(stop);
}

static std::vector<Json> metrics(const std::string& folder) {
  std::vector<Json> lines;
  std::ifstream file(folder + "/metrics.jsonl");
  for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line, folder, ExitCode::kBadInput));
  return lines;
}

void Difference::see(double difference, const std::string& of) {
  if (difference > worst || std::isnan(difference)) worst = difference, what = of;
}

void compare_metrics(const std::string& folder, const std::string& reference, Difference& difference) {
  const std::vector<Json> ours = metrics(folder), theirs = metrics(reference);
  MARROW_CHECK(ours.size() == theirs.size(), ExitCode::kBadInput, Fix("see the runs"), "{} lines against {}",
               ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    for (const char* key : {"loss", "grad_norm", "balance_loss", "validation_loss", "expert_load_max_over_mean"}) {
      if (!theirs[i].has(key)) continue;
      const double a = ours[i].at(key).as_double(), b = theirs[i].at(key).as_double();
      difference.see(std::abs(a - b) / std::abs(b), fmt::format("{} of line {}: {} against {}", key, i + 1, a, b));
    }
  }
}

void compare_parameters(const std::string& folder, const std::string& reference, int64_t step, Difference& difference) {
  const std::string place = fmt::format("/checkpoints/step-{:08}", step);
  const TensorFiles ours(tensor_paths(folder + place, "")), theirs(tensor_paths(reference + place, ""));
  for (const std::string& name : theirs.names()) {
    const at::Tensor a = ours.read_whole(name).to(at::kDouble), b = theirs.read_whole(name).to(at::kDouble);
    // A tensor of zeros has no scale of its own.
    difference.see((a - b).norm().item<double>() / std::max(b.norm().item<double>(), 1e-12), name);
  }
}

void write_inputs(const std::string& root) {
  CorpusWriter writer(root + "/corpus", {"test", "hash", 512, {}}, true);
  uint64_t state = 5;
  for (int document = 0; document < 400; ++document) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < 20 + document % 37; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      tokens.push_back(static_cast<int32_t>((state >> 33) % 512));
    }
    const auto length = static_cast<int32_t>(tokens.size());
    writer.append(tokens, std::span(&length, 1));
  }
  writer.finish();
  for (const int64_t pp : {1, 4}) {
    for (const bool tied : {false, true}) {
      Setting setting;
      setting.mesh.pp = pp;
      setting.tied = tied;
      for (const char* family : {"qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_5_moe_text"}) {
        setting.family = family;
        write_text_file_atomically(run_config(root, "", setting).model.config, model_config(setting));
      }
    }
  }
}

}  // namespace marrow::test
