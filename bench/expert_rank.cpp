// One rank of an expert group alone on a GPU: its own work, waits and launches as on EP GPUs of one host, and exchanges
// that stand still on the stream for as long as NVLink would need. What the other ranks send is a copy of what this one
// sends itself, so speed and idle time are to be read, not losses. A step is forward and backward, without optimizer.
//   build-gpu/bench_expert_rank EP [MODEL.json [SEQUENCES [MICRO_BATCHES [forced|natural [LINK [TRACE.json|graph]]]]]]
// LINK: GB/s that all-to-all reaches each way, or 0 for exchanges that take no time: what is left to hide. graph (EP 1,
// where the host waits for nothing): the same step replayed as one CUDA graph, beside the step launched kernel by
// kernel.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <numeric>
#include <random>

#include "base/error.h"
#include "base/files.h"
#include "pipeline/executor.h"

namespace marrow {
namespace {

constexpr double kClock = 1.7e9;  // cycles a second, of the sleep
constexpr int64_t kSeqLen = 4096;

std::vector<int64_t> ranks_of(int64_t size) {
  std::vector<int64_t> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return ranks;
}

// Rank 0 of `size` ranks that all do what this one does.
class EchoCommunicator final : public Communicator {
 public:
  EchoCommunicator(int64_t size, double link, at::Device device)
      : Communicator("expert", ranks_of(size), 0),
        link_(link),
        stream_(c10::cuda::getStreamFromPool(true, device.index())) {}

  PendingTransfer start(const Operation& operation) override {
    at::cuda::CUDAEvent ready;
    ready.record(at::cuda::getCurrentCUDAStream());
    ready.block(stream_);
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      operation.kind == Operation::kAllToAll ? all_to_all(operation) : all_gather(operation);
    }
    auto done = std::make_shared<at::cuda::CUDAEvent>();
    done->record(stream_);
    return {[done] { done->block(at::cuda::getCurrentCUDAStream()); }, {operation.sent, operation.received}};
  }

 private:
  // From every other rank come the rows that this one sends itself, or where more are to come, any of those it sends.
  void all_to_all(const Operation& operation) const {
    const std::vector<int64_t> first_sent = row_starts(operation.sent, operation.sent_parts);
    const std::vector<int64_t> first_received = row_starts(operation.received, operation.received_parts);
    const at::Tensor own = operation.sent.narrow(0, first_sent[0], operation.sent_parts[0]);
    int64_t rows = 0;  // from others
    for (int64_t r = 0; r < size(); ++r) {
      const int64_t count = operation.received_parts[r];
      if (r > 0) rows += count;
      const at::Tensor& from = count <= own.size(0) ? own : operation.sent;
      for (int64_t done = 0; done < count;) {
        const int64_t part = from.size(0) == 0 ? count : std::min(count - done, from.size(0));
        copy(from.size(0) == 0 ? nullptr : from.data_ptr(), operation.received, first_received[r] + done, part);
        done += part;
      }
    }
    pass_time(rows * row_bytes(operation.received));
  }
  void all_gather(const Operation& operation) const {
    const auto bounds = operation.sent_parts;
    const at::Tensor own = operation.sent.narrow(0, bounds[0], bounds[1] - bounds[0]);
    for (int64_t r = 1; r < size(); ++r)
      operation.sent.narrow(0, bounds[r], bounds[r + 1] - bounds[r]).copy_(own, true);
    pass_time((bounds[size()] - bounds[1]) * own.element_size());
  }
  // Raw calls: NCCL's group, one launch, costs the host little too.
  void copy(const void* from, const at::Tensor& to, int64_t first_row, int64_t rows) const {
    const int64_t width = row_bytes(to);
    char* target = static_cast<char*>(to.data_ptr()) + first_row * width;
    C10_CUDA_CHECK(from == nullptr ? cudaMemsetAsync(target, 0, rows * width, stream_)
                                   : cudaMemcpyAsync(target, from, rows * width, cudaMemcpyDeviceToDevice, stream_));
  }
  void pass_time(int64_t bytes) const {
    if (link_ > 0) at::cuda::sleep(static_cast<int64_t>(kClock * (10e-6 + static_cast<double>(bytes) / link_)));
  }

  double link_;  // bytes a second
  c10::cuda::CUDAStream stream_;
};

MicroBatch zipf_batch(int64_t sequences, int64_t vocab, uint64_t seed, at::Device device) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<int32_t> tokens(static_cast<size_t>(sequences * kSeqLen));
  for (int32_t& token : tokens) token = static_cast<int32_t>(std::pow(vocab, uniform(random))) - 1;
  const std::vector<int32_t> starts(tokens.size(), 0);
  return make_micro_batch(tokens, tokens, starts, sequences, kSeqLen, false, device);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Medians of six, in seconds; host: until all was launched.
struct StepTimes {
  double step, host;
};
StepTimes time_steps(const std::function<void()>& step) {
  std::vector<double> seconds, host;
  for (int i = 0; i < 9; ++i) {
    const auto start = std::chrono::steady_clock::now();
    step();
    host.push_back(seconds_since(start));
    c10::cuda::device_synchronize();
    seconds.push_back(seconds_since(start));
  }
  std::sort(seconds.begin() + 3, seconds.end());
  std::sort(host.begin() + 3, host.end());
  return {seconds[6], host[6]};
}

int run(const std::vector<std::string>& args) {
  const auto arg = [&](size_t i, const char* other) { return i < args.size() ? args[i] : std::string(other); };
  const int64_t ep = std::stoll(arg(1, "8")), sequences = std::stoll(arg(3, "1")), count = std::stoll(arg(4, "8"));
  const std::string path = arg(2, "configs/models/qwen3-30b-a3b-4layers.json"), trace = arg(7, "");
  const at::Device device = use_gpu(0);
  MARROW_CHECK(ep == 1 || trace != "graph", ExitCode::kUsage, Fix("bench_expert_rank 1 …"),
               "the host waits for sizes at ep {}: no graph", ep);
  // As of training's products the priority is low; a graph's must not be on the default stream.
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()));
  EchoCommunicator group(ep, 1e9 * std::stod(arg(6, "350")), device);
  const std::unique_ptr<MoeModel> model = open_model(Json::read_file(path, ExitCode::kUsage));
  ModelParts parts;
  if (ep > 1) parts.experts = &group;
  ParameterStore::Options options;
  options.device = device;
  options.working_dtype = at::kBFloat16;
  options.ep = {ep, 0};
  ParameterStore store(options);
  add_model_parameters(*model, parts, store);
  store.initialize(1);
  BalanceTracker tracker(model->shape(), {BalanceMode::kGlobal, 1e-3}, device);
  Executor::Options executor_options;
  executor_options.forced_routing = arg(5, "forced") == "forced";
  Executor executor(*model, parts, store, &tracker, executor_options);
  const at::Tensor loss = at::zeros({1}, at::TensorOptions().device(device).dtype(at::kDouble));
  std::vector<MicroBatch> batches;
  for (int64_t i = 0; i < count; ++i) batches.push_back(zipf_batch(sequences, model->shape().vocab, i, device));
  const auto step = [&] {
    tracker.begin_step({ep * count * sequences * kSeqLen, ep * count * sequences, ep * count});
    executor.train(
        count, [&](int64_t i) { return batches[i]; }, 1e-5, loss);
    tracker.end_step();
  };
  const StepTimes times = time_steps(step);
  const double tokens = static_cast<double>(count * sequences * kSeqLen);
  const double flops = 3 * model->forward_flops_per_token(kSeqLen);
  const at::Tensor chosen = tracker.previous_counts();  // [layers, E]
  const double load =
      static_cast<double>(ep) * (chosen.narrow(1, 0, chosen.size(1) / ep).sum() / chosen.sum()).item<double>();
  fmt::print(
      "{} ep {} {} sequences x {} {} {} GB/s: {:.1f} ms, {:.0f} tokens/s, {:.0f} TFLOP/s; pairs of the mean {:.2f}, "
      "host {:.1f} ms, {:.1f} GB, {} allocations retried\n",
      path, ep, sequences, count, arg(5, "forced"), arg(6, "350"), 1e3 * times.step, tokens / times.step,
      1e-12 * flops * tokens / times.step, load, 1e3 * times.host, 1e-9 * peak_memory_bytes(device),
      c10::cuda::CUDACachingAllocator::getDeviceStats(0).num_alloc_retries);
  if (trace.empty()) return 0;
  if (trace == "graph") {
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    step();
    graph.capture_end();
    for (int i = 0; i < 3; ++i) {  // in turns
      const StepTimes replayed = time_steps([&] { graph.replay(); }), launched = time_steps(step);
      fmt::print("as a graph {:.1f} ms, host {:.1f} ms; kernel by kernel {:.1f} ms, host {:.1f} ms\n",
                 1e3 * replayed.step, 1e3 * replayed.host, 1e3 * launched.step, 1e3 * launched.host);
    }
    return 0;
  }
  using torch::profiler::impl::ActivityType;
  const std::set<ActivityType> activities = {ActivityType::CUDA};  // the host as fast as without
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO, false, false);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  step();
  c10::cuda::device_synchronize();
  torch::autograd::profiler::disableProfiler()->save(trace);
  return 0;
}

}  // namespace
}  // namespace marrow

int main(int argc, char** argv) {
  try {
    return marrow::run({argv, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
