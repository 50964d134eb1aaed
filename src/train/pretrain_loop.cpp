#include "train/pretrain_loop.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <filesystem>
#include <random>

#include "data/tokenizer.h"
#include "pipeline/layer_placement.h"
#include "pipeline/model_setup.h"
#include "train/evaluation.h"
#include "train/memory_estimate.h"

namespace marrow {
namespace {

constexpr double kLongestSilence = 30;       // seconds, on the console
constexpr double kHopperPeakTflops = 989.0;  // dense bf16, by the vendor's data sheet

// "parameters 18.7 GB, gradients 12.5 GB, optimizer states 24.9 GB"
std::string memory_breakdown(const ParameterStore& store) {
  std::string text;
  for (const auto& [name, bytes] : store.bytes()) {
    text += fmt::format("{}{} {:.1f} GB", text.empty() ? "" : ", ", name, 1e-9 * bytes);
  }
  return text;
}

// `sharers`: ranks that divide a host's memory; a GPU is one rank's.
void check_memory(ParameterStore::Options options, const MoeModel& model, const ModelParts& parts, int64_t sharers) {
  const int64_t available = available_memory_bytes(options.device) / (options.device.is_cpu() ? sharers : 1);
  const std::string device = std::exchange(options.device, at::Device(at::kMeta)).str();
  ParameterStore planned(options);
  add_model_parameters(model, parts, planned);
  int64_t bytes = 0;
  for (const auto& part : planned.bytes()) bytes += part.second;
  MARROW_CHECK(bytes <= available, ExitCode::kDeviceFault,
               Fix("choose a smaller model or fewer layers (num_hidden_layers), set "
                   "optimizer.state_dtype = \"bf16\", or divide it over more processes with [mesh]"),
               "{:.1f} GB for {} parameters ({}) exceed the {:.1f} GB that are free on {}", 1e-9 * bytes,
               planned.elements(), memory_breakdown(planned), 1e-9 * available, device);
}

void check_same_tokenizer(const std::string& what, const std::string& hash, const std::string& other,
                          const std::string& other_hash) {
  MARROW_CHECK(hash.empty() || other_hash.empty() || hash == other_hash, ExitCode::kBadInput,
               Fix("tokenize all text of a model with one tokenizer"), "{} goes with tokenizer {}, {} with {}", what,
               hash, other, other_hash);
}

// A Chrome/Perfetto trace of one step: operators on the host, kernels on the device; with `memory`, allocations and
// frees too. One at a time.
void start_trace(at::Device device, bool memory) {
  using torch::profiler::impl::ActivityType;
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (device.is_cuda()) activities.insert(ActivityType::CUDA);
  // A profiler for GPUs that finds none calls that an error, on standard error; what it cannot do, it throws.
  if (device.is_cpu()) setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO,
                                                     /*report_input_shapes=*/false, memory);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
}

constexpr const char* kRouterState = "router_state.json";

std::vector<double> to_list(const at::Tensor& values) {
  const at::Tensor flat = values.cpu().to(at::kDouble).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

}  // namespace

PretrainLoop::PretrainLoop(const PretrainConfig& config, Bootstrap& bootstrap, RunRecords& records, Logger& logger)
    : config_(config), bootstrap_(bootstrap), records_(records), logger_(logger), device_(at::kCPU) {
  if (bootstrap.rank() != 0) logger.set_quiet(true);  // what all ranks find, one says
  run_together(bootstrap, [&] {
    if (config.train.device == TrainDevice::kGpu) device_ = use_gpu(bootstrap.local_rank());
    if (config.train.dtype == TrainDtype::kFp8) check_fp8_device(device_);
    open_inputs();
  });
  // Each rank may read files of its own.
  check_same_on_all_ranks(bootstrap, "the run's config",
                          to_toml(config_) + model_config_text_ + loader_->fingerprint());
  open_run_folder();
  make_links();
  make_engine();
  if (const auto checkpoint = checkpoint_to_resume()) {
    resume_from(*checkpoint);
  } else if (config_.model.init_from.empty()) {
    store_->initialize(config_.train.seed);
  } else {
    initialize_from(config_.model.init_from);
  }
  if (mesh_.rank != 0) return;
  describe_start();
  // Where nothing is to be done, run.toml goes on telling how it was done.
  const std::string told = config_.log.dir + "/run.toml";
  if (left_to_do() || !std::filesystem::exists(told)) write_text_file_atomically(told, to_toml(config_));
  remove_timelines(config_.log.dir, state_.step);
  metrics_.emplace(config.log.dir, state_.step);
}

void PretrainLoop::open_inputs() {
  model_config_text_ = read_text_file(config_.model.config, ExitCode::kUsage);
  model_ = open_model(Json::parse(model_config_text_, config_.model.config, ExitCode::kUsage));
  check_model_fits(config_, model_->shape(), bootstrap_.size());
  flops_per_token_ = model_->forward_flops_per_token(config_.data.seq_len);
  mesh_ = Mesh(config_.mesh, bootstrap_.rank());
  set_cpu_threads(config_.train.cpu_threads, bootstrap_.ranks_on_host());
  at::globalContext().setDeterministicAlgorithms(config_.train.deterministic, false);
  open_data();
}

// Folders and lock are rank 0's; each rank has its own log.
void PretrainLoop::open_run_folder() {
  run_together(bootstrap_, [&] {
    if (mesh_.rank != 0) return;
    std::filesystem::create_directories(config_.log.dir);
    lock_.emplace(config_.log.dir + "/lock", Fix("wait for the other run, or give this one another log.dir"));
    std::filesystem::create_directories(config_.checkpoint.dir);  // now, not after hours
    checkpoint_lock_.emplace(config_.checkpoint.dir + "/lock",
                             Fix("wait for the other run, or give this one another checkpoint.dir"));
  });
  logger_.open_file(fmt::format("{}/log-rank-{:04}.txt", config_.log.dir, mesh_.rank));
}

void PretrainLoop::make_links() {
  if (bootstrap_.size() > 1) {
    records_.open(config_.log.dir, bootstrap_, mesh_.text(), config_.log.watchdog_seconds);
  }
  links_ = make_mesh_communicators(mesh_, bootstrap_, {.device = device_, .records = &records_, .checked = {}});

  parts_.pipeline = {config_.mesh.schedule, mesh_.shape.pp};
  parts_.pipeline_rank = mesh_.p;
  const int64_t tokens = config_.train.micro_batch * config_.data.seq_len / mesh_.shape.cp;
  const ModelCosts costs = model_costs(*model_, config_.data.seq_len, tokens, mesh_.shape.ep);
  parts_.chunk_layers = place_layers(parts_.pipeline, costs);
  parts_.to_next = links_.to_next.get();
  parts_.from_previous = links_.from_previous.get();
  parts_.to_previous = links_.to_previous.get();
  parts_.from_next = links_.from_next.get();
  parts_.experts = links_.expert.get();
  parts_.context = links_.context.get();
}

void PretrainLoop::make_engine() {
  ParameterStore::Options store = store_options(config_, mesh_, device_);
  store.dense.communicator = links_.dense_shard.get();
  store.experts.communicator = links_.expert_shard.get();
  store.replicas.communicator = links_.replica.get();
  run_together(bootstrap_, [&] {
    check_memory(store, *model_, parts_, bootstrap_.ranks_on_host());
    store_.emplace(store);
    add_model_parameters(*model_, parts_, *store_);
  });
  optimizer_.emplace(*store_, config_.optimizer, links_.world.get());

  BalanceTracker::Options balance;
  balance.mode = config_.router.balance;
  balance.coef = config_.router.coef >= 0 ? config_.router.coef : model_->shape().router_aux_loss_coef;
  balance.z_loss = config_.router.z_loss;
  balance.context = links_.context.get();
  balance.world = links_.world.get();
  tracker_.emplace(model_->shape(), balance, device_);

  Executor::Options executor;
  executor.recompute_layers = config_.train.recompute == Recompute::kLayer;
  executor.recompute_cheap = config_.train.recompute == Recompute::kCheap;
  executor.forced_routing = config_.router.forced;
  executor.deterministic = config_.train.deterministic;
  executor.overlap = config_.train.overlap;
  executor_.emplace(*model_, parts_, *store_, &*tracker_, executor);

  CheckpointWriterOptions writer;
  writer.dir = config_.checkpoint.dir;
  writer.keep = config_.checkpoint.keep;
  writer.async = config_.checkpoint.async;
  writer.rank = mesh_.rank;
  writer.ranks = mesh_.shape.world();
  writer.ranks_on_host = bootstrap_.ranks_on_host();
  writer.run = bootstrap_.broadcast(fmt::format("{:x}", std::random_device()()), 0);
  writer.timeout_seconds = config_.log.watchdog_seconds;
  writer.state_dtype = store.state_dtype;
  checkpoints_.emplace(writer, checkpoint_tensors(*model_, config_.optimizer.name), logger_);
}

void PretrainLoop::open_data() {
  BatchLoader::Options options;
  options.seq_len = config_.data.seq_len;
  options.seed = config_.train.seed;
  options.vocab_size = model_->shape().vocab;
  options.mask_documents = config_.data.mask_documents;
  options.sources = config_.data.train;
  loader_.emplace(options);
  for (const std::string& warning : loader_->warnings()) logger_.warn(warning);
  describe_run();
  options.shuffle = false;
  for (const std::string& prefix : config_.data.validation) {
    options.sources = {{prefix, 1.0}};
    validation_.emplace_back(options);
    for (const std::string& warning : validation_.back().warnings()) logger_.warn(warning);
    check_same_tokenizer(prefix, validation_.back().tokenizer_hash(), "data.train", loader_->tokenizer_hash());
  }
}

void PretrainLoop::describe_start() {
  const auto& [model, data, mesh, train, o, router, checkpoint, log, origin] = config_;
  const auto epochs = static_cast<double>(train.steps) * static_cast<double>(train.global_batch) /
                      static_cast<double>(loader_->samples_per_epoch());
  logger_.info(fmt::format("{}, {} layers, on {} in {}: {}, {} tokens a step, {:.2f} epochs in all; {}", model.config,
                           model_->shape().layers, device_.str(), dtype_name(train.dtype), mesh_text(mesh),
                           train.global_batch * data.seq_len, epochs, log.dir));
  if (left_to_do()) return;
  logger_.warn(fmt::format("nothing to train: {} is at step {}, train.steps is {}; raise it, or set another log.dir",
                           checkpoint.dir, state_.step, train.steps));
}

// What a checkpoint says of the run and its data, read once: the files may be gone when it is saved.
void PretrainLoop::describe_run() {
  state_.optimizer = config_.optimizer.name == OptimizerName::kMuon ? "muon" : "adamw";
  state_.state_dtype = dtype_name(config_.optimizer.state_dtype);
  state_.seed = config_.train.seed;
  state_.seq_len = config_.data.seq_len;
  state_.mask_documents = config_.data.mask_documents;
  state_.corpus = loader_->fingerprint();
  state_.tokenizer_hash = loader_->tokenizer_hash();
  const std::string& prefix = config_.data.train[0].path;
  const std::optional<CorpusInfo> info = IndexedCorpus(prefix).info();
  if (!info) return;
  state_.end_of_document = info->end_of_document.value_or(-1);
  if (info->tokenizer == "bytes") {
    state_.tokenizer = "bytes";
    tokenizer_files_ = bytes_tokenizer_files();
    return;
  }
  state_.tokenizer = "tokenizer.json";
  if (!std::filesystem::exists(info->tokenizer)) {
    logger_.warn(
        fmt::format("the tokenizer of {} is no longer at {}: checkpoints will lack it", prefix, info->tokenizer));
    return;
  }
  check_same_tokenizer(info->tokenizer, open_tokenizer(info->tokenizer)->hash(), prefix, info->tokenizer_hash);
  const std::string folder = std::filesystem::path(info->tokenizer).parent_path().string();
  tokenizer_files_ = read_tokenizer_files(folder.empty() ? "." : folder);
}

// The newest that every rank finds sound; each looks at a part of the files.
std::optional<Checkpoint> PretrainLoop::checkpoint_to_resume() {
  const std::string& dir = config_.checkpoint.dir;
  ContentCheck check;
  check.rank = mesh_.rank;
  check.ranks = bootstrap_.size();
  check.all_agree = [&](bool sound) {
    const std::vector<std::string> votes = bootstrap_.all_gather(sound ? "sound" : "");
    return std::ranges::count(votes, "") == 0;
  };
  std::optional<Checkpoint> newest;
  if (config_.checkpoint.resume) newest = newest_checkpoint(dir, logger_, check);
  run_together(bootstrap_, [&] {
    MARROW_CHECK(newest || !config_.checkpoint.resume || step_folders(dir).empty(), ExitCode::kBadInput,
                 Fix("repair or remove the checkpoints, or set log.dir to a new folder"),
                 "no checkpoint in {} can be used", dir);
    MARROW_CHECK(newest || step_folders(dir).empty(), ExitCode::kUsage,
                 Fix("set log.dir and checkpoint.dir to new folders, or remove the old checkpoints"),
                 "checkpoint.resume is false, but {} holds checkpoints of an earlier run", dir);
  });
  return newest;
}

void PretrainLoop::resume_from(const Checkpoint& checkpoint) {
  check_resumable(checkpoint.state(), checkpoint.config(), state_,
                  Json::parse(model_config_text_, config_.model.config, ExitCode::kUsage));
  load_weights(*model_, checkpoint.folder(), *store_, tracker_->bias());
  checkpoint.load_optimizer(store_->owned_ranges());
  const std::string path = checkpoint.folder() + "/" + kRouterState;
  const at::Tensor counts = tracker_->previous_counts();
  std::vector<double> saved;
  for (const Json& value : Json::read_file(path).at("previous_counts").elements()) saved.push_back(value.as_double());
  MARROW_CHECK(std::ssize(saved) == counts.numel(), ExitCode::kBadInput, Fix("resume from an earlier checkpoint"),
               "{}: {} counts, the model has {}", path, saved.size(), counts.numel());
  counts.copy_(at::tensor(saved, at::kDouble).view_as(counts));
  state_.step = saved_step_ = checkpoint.state().step;
  state_.consumed_sequences = checkpoint.state().consumed_sequences;
  state_.skipped_steps = checkpoint.state().skipped_steps;
  const auto changed = changed_settings(read_text_file(checkpoint.folder() + "/run.toml"), config_);
  logger_.info(fmt::format("resumed from {} at step {}{}{}", checkpoint.folder(), state_.step,
                           changed.empty() ? "" : ", with other settings: ", fmt::join(changed, ", ")));
}

void PretrainLoop::initialize_from(const std::string& path) {
  std::string folder = path;
  if (is_checkpoint_path(path)) {
    const Checkpoint checkpoint = open_checkpoint(path, logger_);
    check_same_tokenizer(path, checkpoint.state().tokenizer_hash, "data.train", loader_->tokenizer_hash());
    folder = checkpoint.folder();
  }
  check_same_model(Json::read_file(folder + "/config.json", ExitCode::kUsage),
                   Json::parse(model_config_text_, config_.model.config, ExitCode::kUsage), folder);
  load_weights(*model_, folder, *store_, tracker_->bias());
  logger_.info(fmt::format("initial weights from {}", path));
}

template <typename Body>
auto PretrainLoop::with_step(int64_t step, Body body) {
  try {
    return body();
  } catch (Error& error) {
    throw error.add_who(fmt::format("step {}", step));
  } catch (const c10::OutOfMemoryError& error) {
    Error ours(ExitCode::kDeviceFault,
               fmt::format("out of memory on {}: {}, activations of {} tokens in {} layers the rest; {}", device_.str(),
                           memory_breakdown(*store_), config_.train.micro_batch * config_.data.seq_len,
                           model_->shape().layers, error.what_without_backtrace()),
               Fix("lower train.micro_batch or data.seq_len, set train.recompute = \"cheap\" or \"layer\", or "
                   "optimizer.state_dtype = \"bf16\""),
               __FILE__, __LINE__);
    throw ours.add_who(fmt::format("step {}", step));
  }
}

int64_t PretrainLoop::run(StopSignal& stop) {
  stop_ = &stop;
  last_end_.emplace(device_);
  std::vector<PendingStep> pending;  // at most one
  const auto settle = [&] {
    for (PendingStep& one : std::exchange(pending, {})) with_step(one.step, [&] { report(std::move(one)); });
  };
  while (left_to_do() && !stopping_) {
    const int64_t step = state_.step + 1;
    const bool last = step == config_.train.steps;
    const auto due = [&](int64_t every) { return every > 0 && step % every == 0; };
    const bool at_once = device_.is_cpu() || last || due(config_.data.validate_every) || due(config_.checkpoint.every);
    PendingStep launched = with_step(step, [&] { return launch_traced(step); });
    settle();  // the previous step's numbers are read while the device works on this one
    pending.push_back(std::move(launched));
    if (at_once) settle();
    with_step(step, [&] {
      if (!stopping_ && !validation_.empty() && (last || due(config_.data.validate_every))) validate(step);
      if (last || due(config_.checkpoint.every)) save(step);
      checkpoints_->poll();
    });
  }
  settle();
  if (saved_step_ != state_.step) save(state_.step);
  checkpoints_->finish();
  return state_.step;
}

// Writes a trace and a timeline of the step if log.trace names it.
PretrainLoop::PendingStep PretrainLoop::launch_traced(int64_t step) {
  if (std::ranges::count(config_.log.trace, step) == 0) return launch_step(step, nullptr);
  start_trace(device_, config_.log.memory_trace);
  ActionTimer timer(device_);
  PendingStep launched = launch_step(step, &timer);
  launched.values.values();  // all of the step must be in the trace
  const std::string rank = bootstrap_.size() > 1 ? fmt::format("-rank-{:04}", mesh_.rank) : "";
  const std::string path = fmt::format("{}/trace-{:08}{}.json", config_.log.dir, step, rank);
  torch::autograd::profiler::disableProfiler()->save(path);  // JSON for ui.perfetto.dev and chrome://tracing
  const std::string timeline = timeline_path(config_.log.dir, step, mesh_.rank);
  write_text_file_atomically(timeline, timeline_json(timer.timeline(), mesh_text(config_.mesh)));
  logger_.info(fmt::format("step {}: trace in {}, timeline in {}", step, path, timeline));
  launched.end = DeviceMark(device_);  // or the next step's time would have what this took
  launched.end.wait();
  return launched;
}

// Sequences of this rank's micro-batch j of a step: (j·D + q)·micro_batch + i.
MicroBatch PretrainLoop::load_micro_batch(int64_t index) const {
  const int64_t size = config_.train.micro_batch;
  const int64_t first = (index * mesh_.data_ranks() + mesh_.data_rank()) * size;
  return to_micro_batch(loader_->load(state_.consumed_sequences + first, size), mesh_, device_);
}

PretrainLoop::PendingStep PretrainLoop::launch_step(int64_t step, ActionTimer* timer) {
  const int64_t sequences = config_.train.global_batch;
  const int64_t micro_batches = sequences / (config_.train.micro_batch * mesh_.data_ranks());  // of this rank
  const int64_t targets = loader_->count_targets(state_.consumed_sequences, sequences);        // N, of all ranks
  if (targets == 0) logger_.warn(fmt::format("step {}: no target in the whole batch", step));
  records_.set_step(step);

  const auto fp64 = at::TensorOptions().device(device_).dtype(at::kDouble);
  const at::Tensor loss_sum = at::zeros({1}, fp64);
  executor_->take_rows_sent();  // a validation's
  tracker_->begin_step({sequences * config_.data.seq_len, sequences, micro_batches * mesh_.data_ranks()});
  executor_->train(
      micro_batches,
      [&](int64_t i) {
        const bool silent = logger_.silent_for(kLongestSilence);
        if (silent) logger_.progress(fmt::format("step {}  micro-batch {} of {}", step, i + 1, micro_batches));
        if (!stop_told_ && stop_->requested()) {
          stop_told_ = true;
          logger_.info("asked to stop: this step or the next is the last, then comes a checkpoint");
        }
        return load_micro_batch(i);
      },
      targets > 0 ? 1.0 / static_cast<double>(targets) : 0.0, loss_sum, timer);
  const at::Tensor sums = at::full({2}, stop_->requested() ? 1.0 : 0.0, fp64);  // who asks to stop, rows sent
  sums[1].fill_(static_cast<double>(executor_->take_rows_sent()));
  if (links_.world) links_.world->all_reduce(sums).wait();
  store_->sum_replicas();
  tracker_->end_step();
  const double rate = learning_rate(config_.optimizer, step, config_.train.steps);
  optimizer_->step(rate, step, loss_sum);
  state_.step = step;
  state_.consumed_sequences += sequences;
  const at::Tensor numbers = at::cat({sums, loss_sum, optimizer_->grad_norm(), tracker_->losses().to(at::kDouble),
                                      tracker_->load_max_over_mean().to(at::kDouble)});
  return {step, targets, rate, DeviceMark(device_), DeferredValues(numbers)};
}

void PretrainLoop::report(PendingStep pending) {
  const std::vector<double> values = pending.values.values();
  std::span<const double> left(values);
  const auto take = [&](int64_t count) {  // in the order of launch_step
    const std::span<const double> taken = left.first(static_cast<size_t>(count));
    left = left.subspan(taken.size());
    return taken;
  };
  stopping_ = take(1)[0] > 0;  // the same on all ranks, since it was summed in the same step
  const double rows_sent = take(1)[0];
  const int64_t layers = model_->shape().moe_layers();
  StepMetrics metrics;
  metrics.step = pending.step;
  const double loss_sum = take(1)[0];
  metrics.loss = pending.targets > 0 ? loss_sum / static_cast<double>(pending.targets) : 0.0;
  metrics.grad_norm = take(1)[0];
  for (const double loss : take(layers)) {
    metrics.balance_loss_per_layer.push_back(loss);
    metrics.balance_loss += loss / layers;
  }
  metrics.expert_load_max_over_mean = std::ranges::max(take(layers));
  metrics.lr = pending.learning_rate;
  metrics.dispatch_rows_per_token =
      rows_sent / static_cast<double>(layers * config_.train.global_batch * config_.data.seq_len);
  metrics.tokens = config_.train.global_batch * config_.data.seq_len;
  metrics.step_seconds = pending.end.seconds_since(*last_end_);
  last_end_ = std::move(pending.end);
  metrics.tokens_per_second = metrics.tokens / metrics.step_seconds;
  const double world = static_cast<double>(mesh_.shape.world());
  metrics.tflops_per_gpu = 3e-12 * flops_per_token_ * metrics.tokens_per_second / world;
  metrics.mfu = device_.is_cuda() ? metrics.tflops_per_gpu / kHopperPeakTflops : std::nan("");
  metrics.peak_memory_bytes = peak_memory_bytes(device_);
  if (metrics_) metrics_->write(metrics);
  if (metrics_ && (pending.step % config_.log.every == 0 || logger_.silent_for(kLongestSilence))) {
    logger_.progress(console_line(metrics, config_.train.steps));
  }
  check_finite(pending.step, metrics.loss, metrics.grad_norm);
}

void PretrainLoop::check_finite(int64_t step, double loss, double grad_norm) {
  if (std::isfinite(loss) && std::isfinite(grad_norm)) return;
  ++state_.skipped_steps;
  MARROW_CHECK(state_.skipped_steps <= config_.train.skip_nonfinite, ExitCode::kDiverged,
               Fix("lower optimizer.lr or lengthen optimizer.warmup_steps and resume from the last "
                   "checkpoint; train.skip_nonfinite = N skips up to N such steps"),
               "step {}: loss {} and gradient norm {} must be finite ({} such steps, train.skip_nonfinite = {})", step,
               loss, grad_norm, state_.skipped_steps, config_.train.skip_nonfinite);
  logger_.warn(fmt::format("step {}: loss {}, gradient norm {}: update skipped ({} of {})", step, loss, grad_norm,
                           state_.skipped_steps, config_.train.skip_nonfinite));
}

void PretrainLoop::validate(int64_t step) {
  double loss = 0;
  int64_t targets = 0;
  for (const BatchLoader& loader : validation_) {
    const int64_t sequences = std::min(config_.data.validate_sequences, loader.samples_per_epoch());
    const EvaluationResult result = evaluate_corpus(*executor_, loader, device_, sequences, config_.train.micro_batch,
                                                    logger_, mesh_, links_.world.get(), stop_);
    stopping_ = result.stopped;
    if (stopping_) return;
    loss += result.loss * static_cast<double>(result.targets);
    targets += result.targets;
  }
  loss /= static_cast<double>(targets);
  if (metrics_) metrics_->write_validation(step, loss);
  logger_.info(fmt::format("step {}: validation loss {:.4f}", step, loss));
  last_end_.emplace(device_);
}

void PretrainLoop::save(int64_t step) {
  CheckpointContent content;
  content.state = state_;
  if (store_->options().replicas.index == 0) content.ranges = store_->owned_ranges();
  const std::vector<HubTensor>& biases = model_->shape().selection_biases;
  for (size_t i = 0; mesh_.rank == 0 && i < biases.size(); ++i) {  // every rank has them all
    const at::Tensor bias = tracker_->bias()[static_cast<int64_t>(i)];
    content.ranges.push_back({&biases[i], 0, bias.numel(), bias, {}, {}});
  }
  content.side_files = tokenizer_files_;
  content.side_files.push_back(
      {kRouterState, JsonWriter().field("previous_counts", to_list(tracker_->previous_counts())).text()});
  content.side_files.push_back({"config.json", model_config_text_});
  content.side_files.push_back({"run.toml", to_toml(config_)});
  checkpoints_->save(content);
  saved_step_ = step;
}

}  // namespace marrow
