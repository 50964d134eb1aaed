// What must hold between the keys of a run config.
#include "ops/pch.h"

#include <fmt/ranges.h>

#include <bit>
#include <filesystem>

#include "train/pretrain_config.h"

namespace marrow {
namespace {

// Of what cannot be looked at, as a name that is too long: false.
bool exists(const std::string& path) {
  std::error_code unread;
  return std::filesystem::exists(path, unread);
}

void check_corpus_exists(const std::string& prefix, const std::string& key) {
  for (const char* ending : {".bin", ".idx"}) {
    MARROW_CHECK(exists(prefix + ending), ExitCode::kUsage,
                 Fix("set {0} to the prefix of a corpus (without .bin), or make it: marrow tokenize --tokenizer bytes "
                     "--input PATH --output {1}",
                     key, prefix),
                 "{}: {}{} does not exist", key, prefix, ending);
  }
}

// "12 or 16": the multiples of `unit` on both sides of `value`.
std::string nearest_multiples(int64_t value, int64_t unit) {
  const int64_t below = value / unit * unit;
  if (below == 0) return fmt::format("{}", unit);
  return fmt::format("{} or {}", below, below + unit);
}

// The largest divisor of `value` that is at most `limit`.
int64_t divisor_below(int64_t value, int64_t limit) {
  int64_t divisor = std::min(value, limit);
  while (value % divisor != 0) --divisor;
  return divisor;
}

// Dimensions that are still "auto" count as 1: what fails then fails with any size.
void check_mesh(const PretrainConfig& config) {
  const PretrainConfig::MeshSizes& mesh = config.mesh;
  const int64_t dp = std::max<int64_t>(mesh.dp, 1), ep = std::max<int64_t>(mesh.ep, 1);
  const int64_t batch = config.train.global_batch, micro = config.train.micro_batch;
  const int64_t unit = micro * dp * ep, micro_batches = batch / unit, seq_len = config.data.seq_len;
  const std::string other_micro =
      batch % (dp * ep) != 0 ? ""
                             : fmt::format(", or train.micro_batch to {}", divisor_below(batch / (dp * ep), micro));
  MARROW_CHECK(batch % unit == 0, ExitCode::kUsage,
               Fix("set train.global_batch to {}{}", nearest_multiples(batch, unit), other_micro),
               "train.global_batch {} does not divide by train.micro_batch {} x mesh.dp {} x mesh.ep {} = {}", batch,
               micro, dp, ep, unit);
  MARROW_CHECK(mesh.pp <= 1 || mesh.schedule != PipelineSchedule::kDualPipeV || micro_batches >= 2 * mesh.pp,
               ExitCode::kUsage,
               Fix("raise train.global_batch to {}, lower train.micro_batch, or set mesh.schedule = \"1f1b\"",
                   2 * mesh.pp * unit),
               "mesh.schedule \"dualpipev\" needs at least 2 x mesh.pp = {} micro-batches, the batch sizes give {}",
               2 * mesh.pp, micro_batches);
  MARROW_CHECK(mesh.cp <= 1 || seq_len % (2 * mesh.cp) == 0, ExitCode::kUsage,
               Fix("set data.seq_len to {}", nearest_multiples(seq_len, 2 * mesh.cp)),
               "data.seq_len {} does not divide by 2 x mesh.cp = {}", seq_len, 2 * mesh.cp);
  MARROW_CHECK(mesh.dp % mesh.replicate == 0, ExitCode::kUsage,
               Fix("set mesh.replicate to {}", divisor_below(mesh.dp, mesh.replicate)),
               "mesh.replicate {} does not divide mesh.dp {}", mesh.replicate, mesh.dp);
}

std::array<int64_t*, 4> sides(PretrainConfig::MeshSizes& mesh) { return {&mesh.pp, &mesh.dp, &mesh.cp, &mesh.ep}; }

bool mesh_fits(const PretrainConfig& config, const ModelShape& shape) try {
  const PipelineShape pipeline{config.mesh.schedule, config.mesh.pp};
  if (shape.experts % config.mesh.ep != 0 || shape.layers < pipeline.chunks()) return false;
  if (shape.tied_embeddings && pipeline.pp > 1 && pipeline.slots() == 1) return false;
  check_mesh(config);
  return true;
} catch (const Error&) {
  return false;
}

// Meshes of `world` ranks: those first that change the fewest of the given sizes, by the least, dp before others.
std::string nearest_meshes(PretrainConfig config, const ModelShape& shape, int64_t world) {
  const PretrainConfig::MeshSizes given = config.mesh;
  PretrainConfig::MeshSizes& to = config.mesh;
  const auto change = [](int64_t from, int64_t size, double weight = 3) {
    return from == 0 || from == size ? 0 : weight + std::abs(std::log2(1.0 * size / from));
  };
  std::multimap<double, PretrainConfig::MeshSizes> candidates;  // by what they change
  for (to.pp = 1; to.pp <= world; ++to.pp) {
    for (to.dp = 1; to.pp * to.dp <= world; ++to.dp) {
      for (to.cp = 1; to.pp * to.dp * to.cp <= world; ++to.cp) {
        to.ep = world / (to.pp * to.dp * to.cp);
        if (to.world() != world) continue;
        const double changed = change(given.pp, to.pp) + change(given.dp, to.dp, 2.5) + change(given.cp, to.cp);
        candidates.emplace(changed + change(given.ep, to.ep), to);
      }
    }
  }
  std::vector<std::string> texts;
  for (const auto& [_, mesh] : candidates) {
    config.mesh = mesh;
    if (texts.size() < 3 && mesh_fits(config, shape)) texts.push_back(mesh_text(mesh));
  }
  return fmt::format("{}", fmt::join(texts, ", or "));
}

// Meshes of `world` ranks, or another number of them for the given mesh; if neither fits, of a power of two below.
std::string what_fits(PretrainConfig config, const ModelShape& shape, int64_t world) {
  const std::string here = nearest_meshes(config, shape, world);
  for (int64_t* size : sides(config.mesh)) *size = std::max<int64_t>(*size, 1);
  std::string there = mesh_fits(config, shape) ? mesh_text(config.mesh) : "";
  if (there.empty() && !here.empty()) return "set [mesh] to " + here;
  int64_t ranks = there.empty() ? world : config.mesh.world();
  while (there.empty() && ranks > 1) there = nearest_meshes(config, shape, ranks = std::bit_floor(ranks - 1ul));
  for (int64_t* size : sides(config.mesh)) *size = 1;
  if (there.empty()) check_mesh(config);  // an error of its own: what keeps every mesh from fitting
  return fmt::format("start {0} process{1} (--processes {0}) with [mesh] {2}{3}{4}", ranks, ranks == 1 ? "" : "es",
                     there, here.empty() ? "" : ", or set [mesh] to ", here);
}

}  // namespace

std::string mesh_text(const PretrainConfig::MeshSizes& mesh) {
  const auto text = [](int64_t size) { return size == 0 ? "\"auto\"" : std::to_string(size); };
  return fmt::format("pp {} x dp {} x cp {} x ep {}", text(mesh.pp), text(mesh.dp), text(mesh.cp), text(mesh.ep));
}

void check_config(const PretrainConfig& config, bool needs_inputs) {
  const auto& [model, data, mesh, train, o, router, checkpoint, log, origin] = config;
  MARROW_CHECK(!data.train.empty(), ExitCode::kUsage, Fix("name at least one corpus: data.train = [\"data/corpus\"]"),
               "data.train is an empty list");
  MARROW_CHECK(data.validate_every == 0 || !data.validation.empty(), ExitCode::kUsage,
               Fix("set data.validation = [\"data/heldout\"], or leave out data.validate_every"),
               "data.validate_every is {}, but data.validation names no corpus", data.validate_every);

  MARROW_CHECK(o.warmup_steps + o.decay_steps <= train.steps, ExitCode::kUsage,
               Fix("lower optimizer.warmup_steps or optimizer.decay_steps, or raise train.steps to {}",
                   o.warmup_steps + o.decay_steps),
               "optimizer.warmup_steps {} + optimizer.decay_steps {} exceed train.steps {}", o.warmup_steps,
               o.decay_steps, train.steps);
  MARROW_CHECK(!train.fp8_at_any_size || train.dtype == TrainDtype::kFp8, ExitCode::kUsage,
               Fix("set train.dtype = \"fp8\", or leave out train.fp8_at_any_size"),
               "train.fp8_at_any_size has no meaning without train.dtype \"fp8\"");
  MARROW_CHECK(o.name != OptimizerName::kMuon || o.state_dtype == TrainDtype::kFp32, ExitCode::kUsage,
               Fix("set optimizer.state_dtype = \"fp32\", or optimizer.name = \"adamw\""),
               "optimizer.state_dtype \"bf16\" does not go with optimizer.name \"muon\"");
  MARROW_CHECK(o.min_lr <= o.lr, ExitCode::kUsage, Fix("set optimizer.min_lr below optimizer.lr"),
               "optimizer.min_lr {} is above optimizer.lr {}", o.min_lr, o.lr);
  MARROW_CHECK(o.schedule != LearningRateSchedule::kConstant || o.decay_steps == 0, ExitCode::kUsage,
               Fix("set optimizer.schedule to \"wsd\" or \"cosine\", or leave out decay_steps"),
               "optimizer.decay_steps {} has no meaning with optimizer.schedule \"constant\"", o.decay_steps);

  std::error_code unread;
  MARROW_CHECK(std::filesystem::is_regular_file(model.config, unread), ExitCode::kUsage,
               Fix("set model.config to a config.json; configs/models has some"), "model.config: {} is no file",
               json_quote(model.config));
  if (!needs_inputs) return;
  MARROW_CHECK(model.init_from.empty() || exists(model.init_from), ExitCode::kUsage,
               Fix("set model.init_from to a checkpoint or a Hugging Face folder"),
               "model.init_from: {} does not exist", json_quote(model.init_from));
  for (const CorpusWeight& source : data.train) check_corpus_exists(source.path, "data.train");
  for (const std::string& prefix : data.validation) check_corpus_exists(prefix, "data.validation");
}

Error& locate(Error& error, const PretrainConfig& config) {
  for (const auto& [key, place] : config.origin.places) {
    if (error.report().what.find(key) != std::string::npos) error.add_who(fmt::format("{} at {}", key, place));
  }
  return error.add_who("config " + config.origin.path);
}

void check_model_fits(PretrainConfig& config, const ModelShape& shape, int64_t world) try {
  MARROW_CHECK(config.data.seq_len <= shape.max_position, ExitCode::kUsage,
               Fix("lower data.seq_len, or raise max_position_embeddings in the model's config"),
               "data.seq_len = {} exceeds the model's max_position_embeddings = {}", config.data.seq_len,
               shape.max_position);
  MARROW_CHECK(config.router.balance != BalanceMode::kBias || !shape.selection_biases.empty(), ExitCode::kUsage,
               Fix("set router.balance to \"global\", \"sequence\", \"micro\" or \"none\""),
               "router.balance = \"bias\": this family's format cannot store a selection bias");
  const auto check_mesh_sizes = [&] {
    const int64_t ep = std::max<int64_t>(config.mesh.ep, 1);
    MARROW_CHECK(shape.experts % ep == 0, ExitCode::kUsage,
                 Fix("set mesh.ep to a divisor of {}: {}", shape.experts, what_fits(config, shape, world)),
                 "{} experts do not divide by mesh.ep = {}", shape.experts, ep);
    PretrainConfig other = config;
    other.mesh.schedule = PipelineSchedule::kDualPipeV;
    for (int64_t* size : sides(other.mesh)) *size = std::max<int64_t>(*size, 1);
    MARROW_CHECK(
        !shape.tied_embeddings || config.mesh.pp <= 1 || config.mesh.schedule == PipelineSchedule::kDualPipeV,
        ExitCode::kUsage,
        Fix(mesh_fits(other, shape) ? "set mesh.schedule = \"dualpipev\", which has embedding and head on one rank"
                                    : what_fits(config, shape, world)),
        "mesh.schedule = \"1f1b\" with mesh.pp = {} divides the tied embedding of the model", config.mesh.pp);
  };
  check_mesh_sizes();  // first what fits with no number of processes
  resolve_mesh(config, world, shape);
  check_mesh_sizes();
  const PipelineShape pipeline{config.mesh.schedule, config.mesh.pp};
  const bool is_short = shape.layers < pipeline.pp || shape.tied_embeddings;  // for 1F1B too
  MARROW_CHECK(shape.layers >= pipeline.chunks(), ExitCode::kUsage,
               Fix("{}{}", what_fits(config, shape, world), is_short ? "" : ", or set mesh.schedule = \"1f1b\""),
               "the model has {} layers; mesh.pp = {} cuts it into {} chunks", shape.layers, pipeline.pp,
               pipeline.chunks());
} catch (Error& error) {
  throw locate(error, config);
}

void resolve_mesh(PretrainConfig& config, int64_t world, const ModelShape& shape) {
  int64_t product = 1, *automatic = nullptr;
  for (int64_t* size : sides(config.mesh)) {
    if (*size == 0) automatic = size;
    product *= std::max<int64_t>(*size, 1);
  }
  MARROW_CHECK(automatic == nullptr ? product == world : world % product == 0, ExitCode::kUsage,
               Fix(what_fits(config, shape, world)), "mesh {} does not fit {} process{}", mesh_text(config.mesh), world,
               world == 1 ? "" : "es");
  if (automatic != nullptr) *automatic = world / product;
  check_mesh(config);
}

}  // namespace marrow
