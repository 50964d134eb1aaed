// marrow estimate: will it fit? Memory of each rank, and what to change where it does not.
#include "app/planned_run.h"
#include "ops/device.h"
#include "ops/fp8_quantize.h"
#include "train/memory_estimate.h"

namespace marrow {
namespace {

constexpr double kGB = 1e9;
constexpr double kH200 = 141 * kGB;

double in_gb(int64_t bytes) { return static_cast<double>(bytes) / kGB; }

// For each rank: what was given, else what is free here, else an H200's.
double memory_of_rank(const CommandLine& args, const PretrainConfig& config, int64_t ranks) {
  if (args.has("memory-gb")) return kGB * args.real("memory-gb", 1e-3, 1e6);
  if (config.train.device == TrainDevice::kCpu) return 1.0 * available_memory_bytes(at::kCPU) / ranks;
  return gpu_available() ? 1.0 * available_memory_bytes(at::Device(at::kCUDA, 0)) : kH200;
}

int64_t largest(const RunEstimate& estimate) {
  return std::ranges::max(estimate.ranks, {}, &RankMemory::total).total();
}

using Change = std::pair<const char*, void (*)(PretrainConfig&)>;
constexpr size_t kOnSameRanks = 5;  // the first so many
constexpr Change kChanges[] = {
    {"train.micro_batch = 1", [](PretrainConfig& c) { c.train.micro_batch = 1; }},
    {"train.recompute = \"cheap\"", [](PretrainConfig& c) { c.train.recompute = Recompute::kCheap; }},
    {"train.recompute = \"layer\"", [](PretrainConfig& c) { c.train.recompute = Recompute::kLayer; }},
    {"optimizer.state_dtype = \"bf16\"",
     [](PretrainConfig& c) {
       if (c.optimizer.name == OptimizerName::kAdamW) c.optimizer.state_dtype = TrainDtype::kBf16;
     }},
    {"mesh.shard = \"layer\"", [](PretrainConfig& c) { c.mesh.shard = ShardMode::kLayer; }},
    {"twice mesh.dp", [](PretrainConfig& c) { c.mesh.dp *= 2; }},
    {"twice mesh.ep", [](PretrainConfig& c) { c.mesh.ep *= 2; }},
    {"twice mesh.pp", [](PretrainConfig& c) { c.mesh.pp *= 2; }}};

// Each change that helps, with what it leads to; those that the run's other keys forbid are left out.
std::string advice(const MoeModel& model, const PretrainConfig& config, int64_t now, double memory) {
  std::string text;
  const auto helps = [&](const char* name, PretrainConfig changed) {
    try {
      check_model_fits(changed, model.shape(), changed.mesh.world());
      const int64_t then = largest(estimate_run(model, changed));
      if (then >= now) return false;
      text +=
          fmt::format("\n  {}: {:.1f} GB{}", name, in_gb(then), static_cast<double>(then) <= memory ? ", fits" : "");
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  PretrainConfig all = config;
  for (size_t i = 0; i < std::size(kChanges); ++i) {
    const auto& [name, apply] = kChanges[i];
    if (i == kOnSameRanks) helps("all of these", all);
    PretrainConfig changed = config;
    apply(changed);
    if (helps(name, changed) && i < kOnSameRanks) apply(all);
  }
  return text.empty() ? "\n  a smaller model, or more ranks in [mesh]" : text;
}

// A line for each run of ranks that hold the same.
std::string table(const std::vector<RankMemory>& ranks) {
  std::string text = fmt::format("{:<9}{:>12}{:>11}{:>11}{:>13}{:>9}{:>8}\n", "ranks", "parameters", "gradients",
                                 "optimizer", "activations", "buffers", "total");
  const auto numbers = [](const RankMemory& r) {
    return fmt::format("{:>12.1f}{:>11.1f}{:>11.1f}{:>13.1f}{:>9.1f}{:>8.1f}", in_gb(r.parameters), in_gb(r.gradients),
                       in_gb(r.optimizer), in_gb(r.activations), in_gb(r.buffers), in_gb(r.total()));
  };
  for (size_t first = 0, end = 0; first < ranks.size(); first = end) {
    while (end < ranks.size() && numbers(ranks[end]) == numbers(ranks[first])) ++end;
    const std::string range = end - first == 1 ? fmt::format("{}", first) : fmt::format("{}-{}", first, end - 1);
    text += fmt::format("{:<9}{}\n", range, numbers(ranks[first]));
  }
  return text;
}

// From which sizes on a product is in fp8.
std::string fp8_table() {
  std::string text = "in fp8 from (rows, of an expert on average; columns; elements of the weight), else in bf16:";
  for (const Fp8Bound& least : fp8_bounds()) {
    text += fmt::format(" {} ({}; {}; {}),", least.product, least.rows, least.columns, least.elements);
  }
  text.back() = '\n';
  return text;
}

int run_estimate(const CommandLine& args) {
  const auto [config, model] = open_planned_run(args);
  const RunEstimate estimate = estimate_run(*model, config);
  const double memory = memory_of_rank(args, config, std::ssize(estimate.ranks));
  const int64_t most = largest(estimate);
  const bool fits = static_cast<double>(most) <= memory;
  const bool gpu = config.train.device == TrainDevice::kGpu;
  const char* dtype = dtype_name(config.train.dtype);

  int64_t save_copy = 0;
  std::string list;
  for (size_t i = 0; i < estimate.ranks.size(); ++i) {
    const RankMemory& r = estimate.ranks[i];
    save_copy = std::max(save_copy, r.save_copy);
    JsonWriter json;
    json.field("rank", i, "parameters", r.parameters, "gradients", r.gradients, "optimizer", r.optimizer);
    json.field("activations", r.activations, "buffers", r.buffers, "outside", r.outside, "total", r.total());
    list += (i == 0 ? "" : ", ") + json.field("save_copy", r.save_copy).text();
  }
  std::string text = fmt::format("{}, {} in {}, micro-batches of {} x {} tokens; GB a rank\n", mesh_text(config.mesh),
                                 gpu ? "GPUs" : "CPUs", dtype, config.train.micro_batch, config.data.seq_len);
  text += table(estimate.ranks);
  if (gpu && config.train.dtype == TrainDtype::kFp8 && !config.train.fp8_at_any_size) text += fp8_table();
  if (config.checkpoint.async) text += fmt::format("a save copies {:.1f} GB a rank to host memory\n", in_gb(save_copy));
  if (estimate.step_seconds > 0) {
    text += fmt::format("a step's passes take {:.2f} s on H200s, exchanges and update not counted\n",
                        estimate.step_seconds);
  }
  text += fmt::format("{}: {:.1f} of {:.1f} GB", fits ? "fits" : "does not fit", in_gb(most), memory / kGB);
  if (!fits) text += "; instead:" + advice(*model, config, most, memory);
  JsonWriter json;
  json.raw("ranks", "[" + list + "]").field("fits", fits, "memory", static_cast<int64_t>(memory));
  json.field("device", gpu ? "gpu" : "cpu", "dtype", dtype, "step_seconds", estimate.step_seconds);
  args.print(text, json);
  return 0;
}

}  // namespace

Subcommand estimate_command() {
  return {.name = "estimate",
          .summary = "memory of each rank of a run, and what to change where it does not fit",
          .positionals = {"RUN.toml"},
          .options = {{"[--set KEY=VALUE]...", "overrides a key, for example mesh.ep=8"},
                      {"[--processes N]", "of the run, where [mesh] leaves a size open"},
                      {"[--memory-gb G]", "what a rank has, in 1e9 bytes"}},
          .example = "marrow estimate run.toml --set mesh.ep=8 --set train.micro_batch=2",
          .notes =
              "Needs no GPU and no corpus. For GPUs, unless the run sets train.device = \"cpu\". Without\n"
              "--memory-gb: what is free on the GPU here, else an H200's 141 GB; for CPUs what is free\n"
              "here, divided by the ranks. Routing is taken as even. Exits 0 also where it does not fit.\n",
          .run = run_estimate};
}

}  // namespace marrow
