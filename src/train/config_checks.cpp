// What must hold between the keys of a run config.
#include "ops/pch.h"

#include <filesystem>

#include "train/pretrain_config.h"

namespace marrow {
namespace {

void check_optimizer(const PretrainConfig& config) {
  const PretrainConfig::Optimizer& o = config.optimizer;
  const int64_t steps = config.train.steps;
  MARROW_CHECK(o.warmup_steps <= steps && o.decay_steps <= steps - o.warmup_steps, ExitCode::kUsage,
               Fix(fmt::format("lower optimizer.warmup_steps or optimizer.decay_steps, or raise "
                               "train.steps to {}",
                               o.warmup_steps + o.decay_steps)),
               "optimizer.warmup_steps {} + optimizer.decay_steps {} exceed train.steps {}", o.warmup_steps,
               o.decay_steps, steps);
  MARROW_CHECK(o.name != OptimizerName::kMuon || o.state_dtype == TrainDtype::kFp32, ExitCode::kUsage,
               Fix("set optimizer.state_dtype = \"fp32\", or optimizer.name = \"adamw\""),
               "optimizer.state_dtype \"bf16\" does not go with optimizer.name \"muon\"");
  MARROW_CHECK(o.min_lr <= o.lr, ExitCode::kUsage, Fix("set optimizer.min_lr below optimizer.lr"),
               "optimizer.min_lr {} is above optimizer.lr {}", o.min_lr, o.lr);
  MARROW_CHECK(o.schedule != LearningRateSchedule::kConstant || o.decay_steps == 0, ExitCode::kUsage,
               Fix("set optimizer.schedule to \"wsd\" or \"cosine\", or leave out decay_steps"),
               "optimizer.decay_steps {} has no meaning with optimizer.schedule \"constant\"", o.decay_steps);
}

void check_corpus_exists(const std::string& prefix, const std::string& key) {
  for (const char* ending : {".bin", ".idx"}) {
    MARROW_CHECK(std::filesystem::exists(prefix + ending), ExitCode::kUsage,
                 Fix(fmt::format("set {} to the prefix of a corpus (without .bin), or make it: "
                                 "marrow tokenize --tokenizer bytes --input PATH --output {}",
                                 key, prefix)),
                 "{}: {}{} does not exist", key, prefix, ending);
  }
}

void check_paths(const PretrainConfig& config, bool needs_inputs) {
  MARROW_CHECK(std::filesystem::is_regular_file(config.model.config), ExitCode::kUsage,
               Fix("set model.config to a config.json; configs/models has some"), "model.config: {} is no file",
               json_quote(config.model.config));
  if (!needs_inputs) return;
  MARROW_CHECK(config.model.init_from.empty() || std::filesystem::exists(config.model.init_from), ExitCode::kUsage,
               Fix("set model.init_from to a checkpoint or a Hugging Face folder"),
               "model.init_from: {} does not exist", json_quote(config.model.init_from));
  for (const DataSource& source : config.data.train) check_corpus_exists(source.path, "data.train");
  for (const std::string& prefix : config.data.validation) {
    check_corpus_exists(prefix, "data.validation");
  }
}

void check_data(const PretrainConfig& config) {
  MARROW_CHECK(!config.data.train.empty(), ExitCode::kUsage,
               Fix("name at least one corpus: data.train = [\"data/corpus\"]"), "data.train is an empty list");
  MARROW_CHECK(config.data.validate_every == 0 || !config.data.validation.empty(), ExitCode::kUsage,
               Fix("set data.validation = [\"data/heldout\"], or leave out data.validate_every"),
               "data.validate_every is {}, but data.validation names no corpus", config.data.validate_every);
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
  const auto known = [](int64_t size) { return size == 0 ? int64_t{1} : size; };
  const int64_t data_ranks = known(mesh.dp) * known(mesh.ep);
  const int64_t batch = config.train.global_batch;
  const int64_t micro = config.train.micro_batch;
  const int64_t unit = micro * data_ranks;
  MARROW_CHECK(batch % unit == 0, ExitCode::kUsage,
               Fix(fmt::format("set train.global_batch to {}{}", nearest_multiples(batch, unit),
                               batch % data_ranks != 0 ? ""
                                                       : fmt::format(", or train.micro_batch to {}",
                                                                     divisor_below(batch / data_ranks, micro)))),
               "train.global_batch {} does not divide by train.micro_batch {} x mesh.dp {} x "
               "mesh.ep {} = {}",
               batch, micro, known(mesh.dp), known(mesh.ep), unit);
  const int64_t micro_batches = batch / unit;
  MARROW_CHECK(mesh.pp <= 1 || mesh.schedule != PipelineSchedule::kDualPipeV || micro_batches >= 2 * mesh.pp,
               ExitCode::kUsage,
               Fix(fmt::format("raise train.global_batch to {}, lower train.micro_batch, or set "
                               "mesh.schedule = \"1f1b\"",
                               2 * mesh.pp * unit)),
               "mesh.schedule \"dualpipev\" needs at least 2 x mesh.pp = {} micro-batches, the "
               "batch sizes give {}",
               2 * mesh.pp, micro_batches);
  const int64_t seq_len = config.data.seq_len;
  MARROW_CHECK(mesh.cp <= 1 || seq_len % (2 * mesh.cp) == 0, ExitCode::kUsage,
               Fix(fmt::format("set data.seq_len to {}", nearest_multiples(seq_len, 2 * mesh.cp))),
               "data.seq_len {} does not divide by 2 x mesh.cp = {}", seq_len, 2 * mesh.cp);
  MARROW_CHECK(mesh.dp == 0 || mesh.dp % mesh.replicate == 0, ExitCode::kUsage,
               Fix(fmt::format("set mesh.replicate to {}", divisor_below(mesh.dp, mesh.replicate))),
               "mesh.replicate {} does not divide mesh.dp {}", mesh.replicate, mesh.dp);
}

std::string mesh_text(const PretrainConfig::MeshSizes& mesh) {
  const auto text = [](int64_t size) { return size == 0 ? std::string("\"auto\"") : std::to_string(size); };
  return fmt::format("pp {} x dp {} x cp {} x ep {}", text(mesh.pp), text(mesh.dp), text(mesh.cp), text(mesh.ep));
}

std::array<int64_t*, 4> sides(PretrainConfig::MeshSizes& mesh) { return {&mesh.pp, &mesh.dp, &mesh.cp, &mesh.ep}; }

bool mesh_fits(const PretrainConfig& config) {
  try {
    check_mesh(config);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Meshes of `world` ranks: those first that change the fewest of the given sizes, by the least, dp before others.
std::string nearest_meshes(PretrainConfig config, int64_t world) {
  const std::array<int64_t*, 4> size = sides(config.mesh);
  const std::array<int64_t, 4> given = {*size[0], *size[1], *size[2], *size[3]};
  std::vector<std::pair<double, std::array<int64_t, 4>>> candidates;
  for (int64_t pp = 1; pp <= world; ++pp) {
    for (int64_t dp = 1; world % pp == 0 && dp <= world / pp; ++dp) {
      for (int64_t cp = 1; world / pp % dp == 0 && cp <= world / pp / dp; ++cp) {
        if (world / pp / dp % cp != 0) continue;
        const std::array<int64_t, 4> sizes = {pp, dp, cp, world / pp / dp / cp};
        double change = 0;
        for (size_t i = 0; i < 4; ++i) {
          if (given[i] != 0 && given[i] != sizes[i])
            change += (i == 1 ? 2.5 : 3) + std::abs(std::log2(1.0 * sizes[i] / given[i]));
        }
        candidates.emplace_back(change, sizes);
      }
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text;
  int64_t found = 0;
  for (size_t i = 0; i < std::min<size_t>(candidates.size(), 64) && found < 3; ++i) {
    for (size_t side = 0; side < 4; ++side) *size[side] = candidates[i].second[side];
    if (!mesh_fits(config)) continue;
    text += (found++ == 0 ? "" : ", or ") + mesh_text(config.mesh);
  }
  return text;
}

}  // namespace

void check_config(const PretrainConfig& config, bool needs_inputs) {
  check_data(config);
  check_optimizer(config);
  check_mesh(config);
  check_paths(config, needs_inputs);
}

void resolve_mesh(PretrainConfig& config, int64_t world) {
  int64_t product = 1;
  int64_t* automatic = nullptr;
  for (int64_t* size : sides(config.mesh)) {
    if (*size == 0) automatic = size;
    product *= std::max<int64_t>(*size, 1);
  }
  if (automatic == nullptr ? product != world : world % product != 0) {
    const std::string meshes = nearest_meshes(config, world);
    MARROW_THROW(ExitCode::kUsage,
                 Fix(fmt::format("start {} processes (--processes {}){}", product, product,
                                 meshes.empty() ? "" : fmt::format(", or set [mesh] to {}", meshes))),
                 "mesh {} does not fit {} process{}", mesh_text(config.mesh), world, world == 1 ? "" : "es");
  }
  if (automatic != nullptr) *automatic = world / product;
  check_mesh(config);
}

}  // namespace marrow
