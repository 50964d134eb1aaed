#include "train/pretrain_loop.h"

#include <filesystem>

#include "data/tokenizer.h"
#include "pipeline/model_setup.h"
#include "train/evaluation.h"
#include "train/learning_rate.h"
#include "train/step_trace.h"

namespace marrow {
namespace {

constexpr double kHopperPeakTflops = 989.0;  // dense bf16, by the vendor's data sheet

double balance_coefficient(const PretrainConfig& config, const ModelShape& shape) {
  return config.router.coef >= 0 ? config.router.coef : shape.router_aux_loss_coef;
}

void check_model_fits(const PretrainConfig& config, const ModelShape& shape) {
  MARROW_CHECK(config.data.seq_len <= shape.max_position, ExitCode::kUsage,
               Fix("lower data.seq_len, or raise max_position_embeddings in the model's config"),
               "data.seq_len = {} exceeds the model's max_position_embeddings = {}", config.data.seq_len,
               shape.max_position);
  const int64_t ep = std::max<int64_t>(config.mesh.ep, 1);  // 0 is "auto"
  MARROW_CHECK(shape.experts % ep == 0, ExitCode::kUsage,
               Fix(fmt::format("set mesh.ep to a divisor of {}", shape.experts)),
               "{} experts do not divide by mesh.ep = {}", shape.experts, ep);
  MARROW_CHECK(config.train.recompute != Recompute::kCheap, ExitCode::kUsage,
               Fix("set train.recompute to \"none\" or \"layer\""), "train.recompute = \"cheap\" is not implemented");
  MARROW_CHECK(config.router.balance != BalanceMode::kBias, ExitCode::kUsage,
               Fix("set router.balance to \"global\", \"sequence\", \"micro\" or \"none\""),
               "router.balance = \"bias\": this family's format cannot store a selection bias");
}

// "parameters 18.7 GB, gradients 12.5 GB, optimizer states 24.9 GB"
std::string memory_breakdown(const ParameterStore::Options& options, int64_t elements) {
  std::string text;
  for (const auto& [name, bytes] : ParameterStore::bytes_per_element(options)) {
    text += fmt::format("{}{} {:.1f} GB", text.empty() ? "" : ", ", name, 1e-9 * bytes * elements);
  }
  return text;
}

void check_memory(const ParameterStore::Options& options, const MoeModel& model) {
  int64_t elements = 0, bytes = 0;
  for (const HubTensor& tensor : all_hub_tensors(model)) elements += tensor.elements();
  for (const auto& part : ParameterStore::bytes_per_element(options)) bytes += part.second * elements;
  const int64_t available = available_memory_bytes(options.device);
  MARROW_CHECK(bytes <= available, ExitCode::kDeviceFault,
               Fix("choose a smaller model or fewer layers (num_hidden_layers), set "
                   "optimizer.state_dtype = \"bf16\", or divide it over more processes with [mesh]"),
               "{:.1f} GB for {} parameters ({}) exceed the {:.1f} GB that are free on {}", 1e-9 * bytes, elements,
               memory_breakdown(options, elements), 1e-9 * available, options.device.str());
}

void check_same_tokenizer(const std::string& what, const std::string& hash, const std::string& other,
                          const std::string& other_hash) {
  MARROW_CHECK(hash.empty() || other_hash.empty() || hash == other_hash, ExitCode::kBadInput,
               Fix("tokenize all text of a model with one tokenizer"), "{} goes with tokenizer {}, {} with {}", what,
               hash, other, other_hash);
}

const char* optimizer_name(OptimizerName name) { return name == OptimizerName::kMuon ? "muon" : "adamw"; }

at::ScalarType scalar_type(TrainDtype dtype) { return dtype == TrainDtype::kBf16 ? at::kBFloat16 : at::kFloat; }

}  // namespace

PretrainLoop::PretrainLoop(const PretrainConfig& config, Logger& logger)
    : config_(config),
      logger_(logger),
      device_(config.train.device == TrainDevice::kGpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU)) {
  model_config_text_ = read_text_file(config.model.config, ExitCode::kUsage);
  model_ = open_model(Json::parse(model_config_text_, config.model.config, ExitCode::kUsage));
  const ModelShape& shape = model_->shape();
  check_model_fits(config_, shape);
  resolve_mesh(config_, 1);
  set_cpu_threads(config.train.cpu_threads, 1);
  at::globalContext().setDeterministicAlgorithms(config.train.deterministic, false);
  open_data();
  open_run_folder();

  ParameterStore::Options store;
  store.device = device_;
  store.working_dtype = scalar_type(config.train.dtype);
  store.state_dtype = scalar_type(config.optimizer.state_dtype);
  store.muon = config.optimizer.name == OptimizerName::kMuon;
  check_memory(store, *model_);
  store_.emplace(store);
  add_model_parameters(*model_, *store_);
  optimizer_.emplace(*store_, config.optimizer);

  BalanceTracker::Options balance;
  balance.mode = config.router.balance;
  balance.coef = balance_coefficient(config, shape);
  balance.z_loss = config.router.z_loss;
  balance.layers = shape.layers;
  balance.experts = shape.experts;
  balance.top_k = shape.top_k;
  tracker_.emplace(balance, device_);

  Executor::Options executor;
  executor.recompute_layers = config.train.recompute == Recompute::kLayer;
  executor.forced_routing = config.router.forced;
  executor.deterministic = config.train.deterministic;
  executor_.emplace(*model_, store_->table(), &*tracker_, device_, executor);

  CheckpointWriterOptions writer;
  writer.dir = config.checkpoint.dir;
  writer.keep = config.checkpoint.keep;
  writer.async = config.checkpoint.async;
  writer.state_dtype = scalar_type(config.optimizer.state_dtype);
  checkpoints_.emplace(writer, checkpoint_tensors(all_parameter_specs(*model_), config.optimizer.name), logger);
  load_initial_state();
  write_text_file_atomically(config_.log.dir + "/run.toml", to_toml(config_));
  metrics_.emplace(config.log.dir, step_);
}

void PretrainLoop::open_data() {
  BatchLoader::Options options;
  options.seq_len = config_.data.seq_len;
  options.seed = config_.train.seed;
  options.vocab_size = model_->shape().vocab;
  options.mask_documents = config_.data.mask_documents;
  for (const DataSource& source : config_.data.train) {
    options.sources.push_back({source.path, source.weight});
  }
  loader_.emplace(options);
  for (const std::string& warning : loader_->warnings()) logger_.warn(warning);
  describe_data();
  options.shuffle = false;
  for (const std::string& prefix : config_.data.validation) {
    options.sources = {{prefix, 1.0}};
    validation_.emplace_back(options);
    for (const std::string& warning : validation_.back().warnings()) logger_.warn(warning);
    check_same_tokenizer(prefix, validation_.back().tokenizer_hash(), "data.train", loader_->tokenizer_hash());
  }
}

// What a checkpoint says of the data, read once: the files may be gone when it is saved.
void PretrainLoop::describe_data() {
  data_state_.seed = config_.train.seed;
  data_state_.seq_len = config_.data.seq_len;
  data_state_.mask_documents = config_.data.mask_documents;
  data_state_.corpus = loader_->fingerprint();
  data_state_.tokenizer_hash = loader_->tokenizer_hash();
  const std::string& prefix = config_.data.train[0].path;
  const std::optional<CorpusInfo> info = IndexedCorpus(prefix).info();
  if (!info) return;
  data_state_.end_of_document = info->end_of_document.value_or(-1);
  if (info->tokenizer == "bytes") {
    data_state_.tokenizer = "bytes";
    tokenizer_files_ = bytes_tokenizer_files();
    return;
  }
  data_state_.tokenizer = "tokenizer.json";
  if (!std::filesystem::exists(info->tokenizer)) {
    logger_.warn(
        fmt::format("the tokenizer of {} is no longer at {}: checkpoints will lack it", prefix, info->tokenizer));
    return;
  }
  check_same_tokenizer(info->tokenizer, open_tokenizer(info->tokenizer)->hash(), prefix, info->tokenizer_hash);
  const std::string folder = std::filesystem::path(info->tokenizer).parent_path().string();
  tokenizer_files_ = read_tokenizer_files(folder.empty() ? "." : folder);
}

void PretrainLoop::open_run_folder() {
  std::filesystem::create_directories(config_.log.dir);
  lock_.emplace(config_.log.dir + "/lock", Fix("wait for the other run, or give this one another log.dir"));
  logger_.open_file(config_.log.dir + "/log-rank-0000.txt");
  std::filesystem::create_directories(config_.checkpoint.dir);  // now, not after hours
}

void PretrainLoop::load_initial_state() {
  if (config_.checkpoint.resume) {
    if (const auto checkpoint = newest_checkpoint(config_.checkpoint.dir, logger_)) {
      resume_from(*checkpoint);
      return;
    }
    MARROW_CHECK(step_folders(config_.checkpoint.dir).empty(), ExitCode::kBadInput,
                 Fix("repair or remove the checkpoints, or set log.dir to a new folder"),
                 "no checkpoint in {} can be used", config_.checkpoint.dir);
  } else {
    MARROW_CHECK(step_folders(config_.checkpoint.dir).empty(), ExitCode::kUsage,
                 Fix("set log.dir and checkpoint.dir to new folders, or remove the old checkpoints"),
                 "checkpoint.resume is false, but {} holds checkpoints of an earlier run", config_.checkpoint.dir);
  }
  if (config_.model.init_from.empty()) {
    store_->initialize(config_.train.seed);
  } else {
    initialize_from(config_.model.init_from);
  }
}

void PretrainLoop::resume_from(const Checkpoint& checkpoint) {
  check_resumable(checkpoint.state(), checkpoint.config(), trainer_state(),
                  Json::parse(model_config_text_, config_.model.config, ExitCode::kUsage));
  const std::vector<OwnedRange> ranges = store_->owned_ranges();
  checkpoint.load_weights(all_hub_tensors(*model_), model_->shape().tied_embeddings, ranges);
  checkpoint.load_optimizer(ranges);
  store_->copy_masters_to_working();
  for (const NamedTensor& saved : checkpoint.router_state()) {
    if (saved.name == "previous_counts") tracker_->previous_counts().copy_(saved.tensor);
    if (saved.name == "bias") tracker_->bias().copy_(saved.tensor);
  }
  step_ = checkpoint.state().step;
  consumed_sequences_ = checkpoint.state().consumed_sequences;
  skipped_steps_ = checkpoint.state().skipped_steps;
  saved_step_ = step_;
  logger_.info(fmt::format("resumed from {} at step {}", checkpoint.folder(), step_));
}

void PretrainLoop::initialize_from(const std::string& path) {
  const std::vector<OwnedRange> ranges = store_->owned_ranges();
  const Json config = Json::parse(model_config_text_, config_.model.config, ExitCode::kUsage);
  if (is_checkpoint_path(path)) {
    const Checkpoint checkpoint = open_checkpoint(path, logger_);
    check_same_model(checkpoint.config(), config);
    check_same_tokenizer(path, checkpoint.state().tokenizer_hash, "data.train", loader_->tokenizer_hash());
    checkpoint.load_weights(all_hub_tensors(*model_), model_->shape().tied_embeddings, ranges);
  } else {
    check_same_model(Json::read_file(path + "/config.json"), config);
    WeightRules rules;
    rules.tied_embeddings = model_->shape().tied_embeddings;
    const ModelWeights weights(path, all_hub_tensors(*model_), rules);
    for (const OwnedRange& range : ranges) weights.read(*range.tensor, range.begin, range.master);
  }
  store_->copy_masters_to_working();
  logger_.info(fmt::format("initial weights from {}", path));
}

TrainerState PretrainLoop::trainer_state() const {
  TrainerState state = data_state_;
  state.step = step_;
  state.consumed_sequences = consumed_sequences_;
  state.skipped_steps = skipped_steps_;
  state.optimizer = optimizer_name(config_.optimizer.name);
  state.state_dtype = config_.optimizer.state_dtype == TrainDtype::kBf16 ? "bf16" : "fp32";
  return state;
}

template <typename Body>
void PretrainLoop::with_step(int64_t step, Body body) {
  try {
    body();
  } catch (Error& error) {
    error.add_who(fmt::format("step {}", step));
    throw;
  } catch (const c10::OutOfMemoryError& error) {
    const int64_t fixed = store_->elements();
    Error ours(ExitCode::kDeviceFault,
               fmt::format("out of memory on {}: {}, activations of {} tokens in {} layers the rest; {}", device_.str(),
                           memory_breakdown(store_->options(), fixed), config_.train.micro_batch * config_.data.seq_len,
                           model_->shape().layers, error.what_without_backtrace()),
               Fix("lower train.micro_batch or data.seq_len, set train.recompute = \"layer\" or "
                   "optimizer.state_dtype = \"bf16\""),
               __FILE__, __LINE__);
    throw ours.add_who(fmt::format("step {}", step));
  }
}

int64_t PretrainLoop::run(StopSignal& stop) {
  last_report_ = std::chrono::steady_clock::now();
  std::optional<PendingStep> pending;
  const auto settle = [&] {
    if (pending) with_step(pending->step, [&] { report(std::move(*pending)); });
    pending.reset();
  };
  while (step_ < config_.train.steps && !stop.requested()) {
    const int64_t step = step_ + 1;
    std::optional<PendingStep> launched;
    with_step(step, [&] {
      std::optional<StepTrace> trace;
      if (std::ranges::count(config_.log.trace, step) > 0) {
        trace.emplace(device_, config_.log.memory_trace);
      }
      launched.emplace(launch_step(step));
      if (trace) save_trace(*trace, step, *launched);
    });
    // The previous step's numbers are read while the device works on this one.
    settle();
    pending = std::move(launched);
    with_step(step, [&] {
      const bool last = step == config_.train.steps;
      const auto due = [&](int64_t every) { return every > 0 && step % every == 0; };
      if (device_.is_cpu() || last || due(config_.data.validate_every) || due(config_.checkpoint.every)) {
        settle();
      }
      if (!validation_.empty() && (last || due(config_.data.validate_every))) validate(step);
      if (last || due(config_.checkpoint.every)) save(step);
      checkpoints_->poll();
    });
  }
  settle();
  if (saved_step_ != step_) save(step_);
  checkpoints_->finish();
  return step_;
}

void PretrainLoop::save_trace(StepTrace& trace, int64_t step, PendingStep& launched) {
  launched.values.values();  // all of the step must be in the trace
  const std::string path = fmt::format("{}/trace-{:08}.json", config_.log.dir, step);
  trace.save(path);
  logger_.info(fmt::format("step {}: trace in {}", step, path));
}

PretrainLoop::PendingStep PretrainLoop::launch_step(int64_t step) {
  const int64_t micro_batch = config_.train.micro_batch;
  const int64_t sequences = config_.train.global_batch;
  std::vector<SequenceBatch> batches;
  int64_t targets = 0;
  for (int64_t first = 0; first < sequences; first += micro_batch) {
    batches.push_back(loader_->load(consumed_sequences_ + first, micro_batch));
    targets += std::count_if(batches.back().targets.begin(), batches.back().targets.end(),
                             [](int32_t target) { return target >= 0; });
  }
  if (targets == 0) logger_.warn(fmt::format("step {}: no target in the whole batch", step));
  const double gradient_scale = targets > 0 ? 1.0 / static_cast<double>(targets) : 0.0;

  const at::Tensor loss_sum = at::zeros({1}, at::TensorOptions().device(device_).dtype(at::kDouble));
  tracker_->begin_step({sequences * config_.data.seq_len, sequences, static_cast<int64_t>(batches.size())});
  for (size_t i = 0; i < batches.size(); ++i) {
    const SequenceBatch& batch = batches[i];
    try {
      executor_->train(make_micro_batch(batch.tokens, batch.targets, batch.document_start, batch.sequences,
                                        batch.seq_len, config_.data.mask_documents, device_),
                       gradient_scale, loss_sum);
    } catch (Error& error) {
      error.add_who(fmt::format("micro-batch {}", i));
      throw;
    }
  }
  tracker_->end_step();
  const double rate = learning_rate(config_.optimizer, step, config_.train.steps);
  optimizer_->step(rate, step, loss_sum);
  step_ = step;
  consumed_sequences_ += sequences;
  const at::Tensor numbers = at::cat({loss_sum, optimizer_->grad_norm(), tracker_->losses().to(at::kDouble),
                                      tracker_->load_max_over_mean().to(at::kDouble)});
  return {step, targets, rate, DeferredValues(numbers)};
}

void PretrainLoop::report(PendingStep pending) {
  const std::vector<double> values = pending.values.values();
  const auto now = std::chrono::steady_clock::now();
  const int64_t layers = model_->shape().layers;
  StepMetrics metrics;
  metrics.step = pending.step;
  metrics.loss = pending.targets > 0 ? values[0] / static_cast<double>(pending.targets) : 0.0;
  metrics.grad_norm = values[1];
  metrics.balance_loss_per_layer.assign(values.begin() + 2, values.begin() + 2 + layers);
  for (const double loss : metrics.balance_loss_per_layer) metrics.balance_loss += loss / layers;
  metrics.expert_load_max_over_mean = *std::max_element(values.begin() + 2 + layers, values.end());
  metrics.lr = pending.learning_rate;
  metrics.tokens = config_.train.global_batch * config_.data.seq_len;
  metrics.step_seconds = std::chrono::duration<double>(now - last_report_).count();
  metrics.tokens_per_second = metrics.tokens / metrics.step_seconds;
  metrics.tflops_per_gpu = 3e-12 * model_->forward_flops_per_token(config_.data.seq_len) * metrics.tokens_per_second;
  metrics.mfu = device_.is_cuda() ? metrics.tflops_per_gpu / kHopperPeakTflops : std::nan("");
  metrics.peak_memory_bytes = peak_memory_bytes(device_);
  last_report_ = now;
  metrics_->write(metrics);
  if (pending.step % config_.log.every == 0) {
    logger_.progress(console_line(metrics, config_.train.steps));
  }
  check_finite(pending.step, metrics.loss, metrics.grad_norm);
}

void PretrainLoop::check_finite(int64_t step, double loss, double grad_norm) {
  if (std::isfinite(loss) && std::isfinite(grad_norm)) return;
  ++skipped_steps_;
  MARROW_CHECK(skipped_steps_ <= config_.train.skip_nonfinite, ExitCode::kDiverged,
               Fix("lower optimizer.lr or lengthen optimizer.warmup_steps and resume from the last "
                   "checkpoint; train.skip_nonfinite = N skips up to N such steps"),
               "step {}: loss {} and gradient norm {} must be finite ({} such steps, "
               "train.skip_nonfinite = {})",
               step, loss, grad_norm, skipped_steps_, config_.train.skip_nonfinite);
  logger_.warn(fmt::format("step {}: loss {}, gradient norm {}: update skipped ({} of {})", step, loss, grad_norm,
                           skipped_steps_, config_.train.skip_nonfinite));
}

void PretrainLoop::validate(int64_t step) {
  double loss = 0;
  int64_t targets = 0;
  for (const BatchLoader& loader : validation_) {
    EvaluationSizes sizes;
    sizes.sequences = std::min(config_.data.validate_sequences, loader.samples_per_epoch());
    sizes.micro_batch = config_.train.micro_batch;
    sizes.mask_documents = config_.data.mask_documents;
    const EvaluationResult result = evaluate_corpus(*executor_, loader, device_, sizes);
    loss += result.loss * static_cast<double>(result.targets);
    targets += result.targets;
  }
  loss /= static_cast<double>(targets);
  metrics_->write_validation(step, loss);
  logger_.info(fmt::format("step {}: validation loss {:.4f}", step, loss));
  last_report_ = std::chrono::steady_clock::now();
}

void PretrainLoop::save(int64_t step) {
  CheckpointContent content;
  content.state = trainer_state();
  content.ranges = store_->owned_ranges();
  content.router_state = {{"previous_counts", tracker_->previous_counts().cpu()}, {"bias", tracker_->bias().cpu()}};
  content.side_files = tokenizer_files_;
  content.side_files.push_back({"config.json", model_config_text_});
  content.side_files.push_back({"run.toml", to_toml(config_)});
  checkpoints_->save(content);
  saved_step_ = step;
}

}  // namespace marrow
