// Does a dispatch that kernels write straight into the other GPUs beat the one of today? One MoE layer's exchange at
// Qwen3-30B-A3B's width, forth and back, by src/parallel/expert_dispatch ("today") and by the kernels beside this file
// ("direct"): checked against each other, alone and next to a large product. The last line is PASS or FAIL.
//   mpirun -n 2 build-gpu/bench_nvlink [ipc]       windows by NCCL, or by CUDA's handles between processes
#include "ops/pch.h"
// After the precompiled header:
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <cstring>
#include <numeric>

#include "nvlink_window.h"
#include "ops/device.h"
#include "ops/rows.h"
#include "ops/swiglu.h"
#include "parallel/bootstrap.h"
#include "parallel/expert_dispatch.h"

namespace marrow::nvlink {
namespace {

using at::Tensor;

constexpr int64_t kHidden = 2048, kExperts = 128, kTopK = 8, kIntermediate = 768, kSquare = 8192;
constexpr int kIterations = 12;
constexpr uint64_t kDelay = 20'000'000;  // nanoseconds in which the host gets ahead of the GPU

[[noreturn]] void fail(const std::string& text) {
  fmt::print("FAIL {}  next: bench_nvlink ipc, or NCCL_DEBUG=INFO\n", text);
  std::fflush(stdout);
  _exit(4);  // mpirun ends the other ranks
}

void check_cuda(cudaError_t status, const StuckReport* stuck, const char* what) {
  if (status == cudaSuccess) return;
  if (stuck != nullptr && stuck->stuck != 0) {
    fail(fmt::format("rank {}, block {} waited in vain for block {} of rank {}: its epoch is {}, wanted {}",
                     stuck->rank, stuck->block, stuck->for_block, stuck->for_rank, stuck->has, stuck->wants));
  }
  fail(fmt::format("{}: {}", what, cudaGetErrorString(status)));
}

// Moments on the GPU's streams, in each of several iterations.
class Marks {
 public:
  explicit Marks(int count) : events_(static_cast<size_t>(count) * kIterations) {
    for (cudaEvent_t& event : events_) check_cuda(cudaEventCreate(&event), nullptr, "cudaEventCreate");
    count_ = count;
  }
  ~Marks() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;
  void restart() { iteration_ = -1; }
  void next() { ++iteration_; }
  void mark(int which, cudaStream_t stream) { cudaEventRecord(event(iteration_, which), stream); }
  // Median over the iterations but the first two, in microseconds.
  double between(int from, int to) const {
    std::vector<double> all;
    for (int i = 2; i < kIterations; ++i) {
      float milliseconds = 0;
      check_cuda(cudaEventElapsedTime(&milliseconds, event(i, from), event(i, to)), nullptr, "cudaEventElapsedTime");
      all.push_back(1e3 * milliseconds);
    }
    std::nth_element(all.begin(), all.begin() + static_cast<int64_t>(all.size() / 2), all.end());
    return all[all.size() / 2];
  }

 private:
  cudaEvent_t event(int iteration, int which) const { return events_[static_cast<size_t>(iteration * count_ + which)]; }
  std::vector<cudaEvent_t> events_;
  int count_ = 0, iteration_ = -1;
};

// One rank of the experiment, at T tokens.
class Experiment {
 public:
  Experiment(Bootstrap& bootstrap, Communicator& group, at::Device device)
      : bootstrap_(bootstrap),
        group_(group),
        device_(device),
        main_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        side_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())) {
    c10::cuda::setCurrentCUDAStream(main_);
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&x_.stuck), sizeof *x_.stuck, cudaHostAllocMapped), nullptr,
               "cudaHostAlloc");
    *x_.stuck = {};
    x_.rank = static_cast<int32_t>(group.rank());
    x_.ranks = static_cast<int32_t>(group.size());
    x_.top_k = kTopK;
    x_.experts = kExperts;
    x_.row_bytes = kHidden * 2;
    left_ = random({kSquare, kSquare});
    right_ = random({kSquare, kSquare});
    product_ = at::empty({kSquare, kSquare}, left_.options());
    for (cudaEvent_t* event : {&ready_, &done_}) {
      check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), nullptr, "cudaEventCreate");
    }
  }

  // Largest first: later ones lie in its window.
  void open_window(bool ipc, int64_t largest) {
    size_for(largest);
    if (ipc) {
      ipc_.open(bootstrap_.all_gather(ipc_.allocate(x_.bytes)), x_);
    } else {
      nccl_.open(bootstrap_.broadcast(x_.rank == 0 ? new_nccl_identity() : "", 0), x_, x_.bytes);
    }
    window_bytes_ = x_.bytes;
    bootstrap_.barrier();
  }
  void close_window(bool ipc) {
    synchronize("the end");
    bootstrap_.barrier();
    ipc ? ipc_.close(x_) : nccl_.close();
    bootstrap_.barrier();
  }

  int64_t run(int64_t tokens, bool skewed) {
    size_for(tokens);
    MARROW_CHECK(x_.bytes <= window_bytes_, ExitCode::kUsage, Fix("open the window for the largest size"),
                 "{} bytes in a window of {}", x_.bytes, window_bytes_);
    // Only the flags must outlive a change of sizes, and they lie in front.
    make_inputs(skewed);
    const int64_t wrong = compare();
    print_sizes(skewed);
    measure_today();
    measure_bounds();
    for (const int blocks : {8, 16, 32, 64}) measure_direct(blocks);
    return wrong;
  }

  // The time of a kernel that does nothing but meet.
  void measure_meeting() {
    for (const int blocks : {8, 64}) {
      Marks marks(2);
      repeat(marks, [&] {
        marks.mark(0, main_);
        for (int i = 0; i < 10; ++i) launch_meet(x_, epoch(), blocks, main_);
        marks.mark(1, main_);
      });
      say("a kernel of {} blocks that meets the other ranks once: {:.1f} us", blocks, slowest(marks, 0, 1) / 10);
    }
  }

 private:
  template <typename... Values>
  void say(fmt::format_string<Values...> format, Values&&... values) const {
    if (x_.rank == 0) fmt::print("{}\n", fmt::format(format, std::forward<Values>(values)...));
    std::fflush(stdout);
  }
  Tensor random(at::IntArrayRef shape) const {
    return at::randn(shape, at::TensorOptions(device_).dtype(at::kFloat)).to(at::kBFloat16);
  }
  uint32_t epoch() { return epoch_ += kEpochsPerLaunch; }
  int64_t worst_rows() const { return x_.ranks * x_.tokens * kTopK; }
  void size_for(int64_t tokens) {
    x_.tokens = tokens;
    x_.lay_out();
  }
  Tensor in_window(int64_t offset, at::IntArrayRef shape, at::ScalarType dtype) const {
    return at::for_blob(x_.windows[x_.rank] + offset, shape)
        .options(at::TensorOptions(device_).dtype(dtype))
        .target_device(device_)
        .make_tensor();
  }
  char* bytes_of(const Tensor& tensor) const { return static_cast<char*>(tensor.data_ptr()); }
  Plan plan() const {
    return {choices_.const_data_ptr<int32_t>(), weights_.const_data_ptr<float>(), offsets_.data_ptr<int32_t>(),
            rows_of_token_.data_ptr<int32_t>()};
  }
  void synchronize(const char* what) const { check_cuda(cudaDeviceSynchronize(), x_.stuck, what); }
  // Every rank's value.
  std::vector<double> of_all(double value) const {
    std::vector<double> all;
    for (const std::string& bytes : bootstrap_.all_gather({reinterpret_cast<const char*>(&value), sizeof value})) {
      std::memcpy(&all.emplace_back(), bytes.data(), sizeof value);
    }
    return all;
  }
  static std::string listed(const std::vector<double>& values) {
    std::string text;
    for (const double value : values) text += fmt::format("{}{:.0f}", text.empty() ? "" : " ", value);
    return text;
  }
  double slowest(const Marks& marks, int from, int to) const {
    const std::vector<double> all = of_all(marks.between(from, to));
    return *std::max_element(all.begin(), all.end());
  }
  template <typename Body>
  void repeat(Marks& marks, const Body& body) {
    marks.restart();
    marks.next();
    body();  // the first call of a size allocates
    synchronize("a first call");
    marks.restart();
    bootstrap_.barrier();
    launch_delay(kDelay, main_);
    for (int i = 0; i < kIterations; ++i) {
      marks.next();
      body();
    }
    synchronize("a measurement");
  }

  // Gumbel's way to draw k experts of each token without repetition; skewed: the busiest expert gets almost every
  // token, as routers with random weights have it.
  void make_inputs(bool skewed) {
    at::manual_seed(17);  // the same experts are busy for all ranks
    const auto options = at::TensorOptions(device_).dtype(at::kFloat);
    const Tensor place = at::randperm(kExperts, options.dtype(at::kLong)).to(at::kFloat) + 1;
    at::manual_seed(100 + static_cast<uint64_t>(x_.rank));
    const Tensor noise = at::rand({x_.tokens, kExperts}, options).clamp_min_(1e-9).log_().neg_().log_().neg_();
    const Tensor scores = skewed ? noise.sub_(place.log()) : noise;
    choices_ = std::get<1>(at::topk(scores, kTopK, 1)).to(at::kInt).contiguous();
    counts_ = at::bincount(choices_.flatten(), {}, kExperts).to(at::kInt).view({1, kExperts});
    weights_ = at::rand({x_.tokens, kTopK}, options);
    tokens_ = random({x_.tokens, kHidden});
    residual_ = random({x_.tokens, kHidden});
    rows_ = at::empty({worst_rows(), kHidden}, tokens_.options());
    row_weights_ = at::empty({worst_rows()}, options);
    offsets_ = at::empty({kExperts / x_.ranks}, choices_.options());
    rows_of_token_ = at::empty({x_.tokens, x_.ranks}, choices_.options());
    own_tokens_ = in_window(x_.own_tokens, {x_.tokens, kHidden}, at::kBFloat16);
    partials_ = in_window(x_.partials, {x_.ranks * x_.tokens, kHidden}, at::kBFloat16);
    synchronize("the inputs");
    bootstrap_.barrier();  // windows change their layout
  }

  struct Today {
    ExpertPermutation order;
    Tensor arrived, rows, row_weights, out;
  };
  // What a layer does now; `mark` is told where it is, `between` stands for other work while rows are on their way.
  template <typename Mark, typename Between>
  Today today(const Mark& mark, const Between& between) {
    mark(0);
    ExpertDispatch dispatch(group_, kExperts);
    dispatch.plan(choices_, counts_);
    mark(1);
    dispatch.start_dispatch(tokens_, weights_);
    mark(2);
    between();
    mark(3);
    const DispatchedTokens arrived = dispatch.finish_dispatch();
    mark(4);
    Today result;
    result.arrived = arrived.rows;
    result.order = expert_permutation(arrived.experts, kExperts / group_.size());
    mark(5);
    result.rows = gather_rows(arrived.rows, result.order.map, arrived.expert_rows, result.order.offsets);
    result.row_weights = gather_values(arrived.weights, result.order, arrived.expert_rows);
    mark(6);
    const Tensor sums = sum_rows(result.rows, result.order.map, {});
    mark(7);
    dispatch.start_combine(sums);
    mark(8);
    between();
    mark(9);
    const Tensor back = dispatch.finish_combine();
    mark(10);
    result.out = sum_rows(back, dispatch.map(), residual_);
    mark(11);
    return result;
  }

  Tensor add_partials() { return sum_rows(partials_, {rows_of_token_.flatten(), rows_of_token_}, residual_); }
  void multiply() { at::mm_out(product_, left_, right_); }

  // Both ways to the same numbers. Returns how many of all ranks' are wrong.
  int64_t compare() {
    const Today expected = today([](int) {}, [] {});
    synchronize("today's exchange");
    real_rows_ = expected.order.offsets[-1].item<int64_t>();
    const Tensor result_rows = expected.rows.narrow(0, 0, real_rows_);
    int64_t wrong = 0;
    const auto count = [&](const char* what, const Tensor& differs) {
      const auto bad = differs.sum().item<int64_t>();
      if (bad > 0) fmt::print("rank {}: {} of {} {} differ\n", x_.rank, bad, differs.numel(), what);
      wrong += bad;
    };
    for (const std::string way : {"plan, pull", "plan and pull", "plan, push, spread"}) {
      const int blocks = way == "plan, pull" ? 16 : 64;
      rows_.fill_(NAN);
      own_tokens_.copy_(tokens_);
      partials_.fill_(NAN);
      char* rows = bytes_of(rows_);
      auto* weights = row_weights_.data_ptr<float>();
      if (way == "plan and pull") {
        launch_plan_and_pull(x_, epoch(), blocks, plan(), rows, weights, main_);
      } else {
        launch_plan(x_, epoch(), blocks, plan(), main_);
        if (way == "plan, pull") launch_pull(x_, epoch(), blocks, rows, weights, main_);
      }
      if (way == "plan, push, spread") {
        launch_push(x_, epoch(), blocks, plan().choices, bytes_of(tokens_), main_);
        launch_spread(x_, bytes_of(tokens_), rows, weights, main_);
      }
      launch_combine(x_, epoch(), blocks, rows, main_);
      const Tensor out = add_partials();
      synchronize(way.c_str());
      count("offsets", offsets_.ne(expected.order.offsets));
      count("dispatched values", rows_.narrow(0, 0, real_rows_).view(at::kShort).ne(result_rows.view(at::kShort)));
      count("routing weights", row_weights_.narrow(0, 0, real_rows_).ne(expected.row_weights.narrow(0, 0, real_rows_)));
      // With two ranks both add in the same order; with more, today's order is that of a token's choices.
      const Tensor far = out.to(at::kFloat).sub_(expected.out.to(at::kFloat)).abs_();
      count("combined values",
            x_.ranks == 2 ? out.ne(expected.out) : far.gt(expected.out.to(at::kFloat).abs_().mul_(0.01).add_(0.01)));
    }
    double sum = 0;
    for (const double each : of_all(static_cast<double>(wrong))) sum += each;
    return static_cast<int64_t>(sum);
  }

  void print_sizes(bool skewed) {
    const double remote = static_cast<double>(rows_of_token_.ge(0).sum().item<int64_t>() -
                                              rows_of_token_.select(1, x_.rank).ge(0).sum().item<int64_t>());
    sent_bytes_ = remote * static_cast<double>(x_.row_bytes);
    const Tensor ends = offsets_.to(at::kCPU);
    const auto busiest = std::max(ends[0].item<int64_t>(), at::diff(ends).max().item<int64_t>());
    const double mean = static_cast<double>(x_.tokens * kTopK * x_.ranks) / kExperts;
    const std::vector<double> rows = of_all(static_cast<double>(real_rows_)),
                              loads = of_all(static_cast<double>(busiest) / mean), sent = of_all(remote);
    const auto row_mib = [&](double count) { return count * static_cast<double>(x_.row_bytes) / (1 << 20); };
    say("\n== ep {}, {} tokens a rank, {}: busiest expert {:.1f} x the mean; expert rows of the ranks {} of {} at "
        "worst",
        x_.ranks, x_.tokens, skewed ? "skewed" : "uniform", *std::max_element(loads.begin(), loads.end()), listed(rows),
        worst_rows());
    say("   rows sent to other ranks {} ({:.0f} MiB of rank 0); window {:.0f} MiB (tokens {:.0f}, arrived {:.0f}, "
        "partials {:.0f}, the rest {:.1f}); expert rows {:.0f} MiB at worst, {:.0f} in truth",
        listed(sent), row_mib(remote), static_cast<double>(x_.bytes) / (1 << 20),
        row_mib(static_cast<double>(x_.tokens)), row_mib(static_cast<double>(x_.ranks * x_.tokens)),
        row_mib(static_cast<double>(x_.ranks * x_.tokens)), static_cast<double>(x_.own_tokens) / (1 << 20),
        row_mib(static_cast<double>(worst_rows())), row_mib(static_cast<double>(real_rows_)));
  }

  double rate(double microseconds) const { return sent_bytes_ / microseconds / 1e3; }  // GB/s

  void measure_today() {
    {
      Marks marks(3);
      repeat(marks, [&] {
        marks.mark(0, main_);
        multiply();
        marks.mark(1, main_);
        multiply();
        marks.mark(2, main_);
      });
      products_ = slowest(marks, 0, 2);
    }
    Marks marks(12);
    const auto mark = [&](int which) { marks.mark(which, main_); };
    repeat(marks, [&] { today(mark, [] {}); });
    const auto us = [&](int from, int to) { return slowest(marks, from, to); };
    say("   today            plan {:.0f} move {:.0f} (of it before the wait {:.0f}; {:.0f} GB/s) permutation {:.0f} "
        "gather {:.0f} = {:.0f} us | sum {:.0f} move {:.0f} ({:.0f} GB/s) add {:.0f} = {:.0f} us",
        us(0, 1), us(1, 4), us(1, 2), rate(us(1, 4)), us(4, 5), us(5, 6), us(0, 6), us(6, 7), us(7, 10),
        rate(us(7, 10)), us(10, 11), us(6, 11));
    repeat(marks, [&] { today(mark, [&] { multiply(); }); });
    say("   today + GEMMs    {:.0f} us, of which the GEMMs alone {:.0f}: {:.0f} added; the GEMMs take {:.0f} more, "
        "then "
        "waits of {:.0f} and {:.0f}",
        us(0, 11), products_, us(0, 11) - products_, us(2, 3) + us(8, 9) - products_, us(3, 4), us(9, 10));
  }

  // What today's local kernels lose by working on the worst case's rows, which needs no exchange to mend.
  void measure_bounds() {
    const Today made = today([](int) {}, [] {});
    const Tensor gate_up = random({worst_rows(), 2 * kIntermediate});
    Marks marks(5);
    repeat(marks, [&] {
      marks.mark(0, main_);
      gather_rows(made.arrived, made.order.map, made.rows.size(0));
      marks.mark(1, main_);
      gather_rows(made.arrived, made.order.map, real_rows_);
      marks.mark(2, main_);
      swiglu(gate_up, row_weights_);
      marks.mark(3, main_);
      swiglu(gate_up.narrow(0, 0, real_rows_), row_weights_.narrow(0, 0, real_rows_));
      marks.mark(4, main_);
    });
    say("   rows at worst, in truth: gather {:.0f}, {:.0f} us; SwiGLU forward {:.0f}, {:.0f} us", slowest(marks, 0, 1),
        slowest(marks, 1, 2), slowest(marks, 2, 3), slowest(marks, 3, 4));
  }

  void measure_direct(int blocks) {
    char *rows = bytes_of(rows_), *tokens = bytes_of(tokens_);
    auto* weights = row_weights_.data_ptr<float>();
    Marks marks(12);
    const auto mark = [&](int which) { marks.mark(which, main_); };
    const auto us = [&](int from, int to) { return slowest(marks, from, to); };
    repeat(marks, [&] {
      mark(0);
      own_tokens_.copy_(tokens_);
      mark(1);
      launch_plan(x_, epoch(), blocks, plan(), main_);
      mark(2);
      launch_pull(x_, epoch(), blocks, rows, weights, main_);
      mark(3);
      launch_push(x_, epoch(), blocks, plan().choices, tokens, main_);
      mark(4);
      launch_spread(x_, tokens, rows, weights, main_);
      mark(5);
      launch_combine(x_, epoch(), blocks, rows, main_);
      mark(6);
      add_partials();
      mark(7);
    });
    say("   direct {:2} blocks plan {:.0f} copy {:.0f} pull {:.0f} ({:.0f} GB/s) = {:.0f} us, or plan push {:.0f} "
        "({:.0f} GB/s) spread {:.0f} = {:.0f} us | combine {:.0f} ({:.0f} GB/s) add {:.0f} = {:.0f} us",
        blocks, us(1, 2), us(0, 1), us(2, 3), rate(us(2, 3)), us(0, 3), us(3, 4), rate(us(3, 4)), us(4, 5),
        us(1, 2) + us(3, 5), us(5, 6), rate(us(5, 6)), us(6, 7), us(5, 7));
    // `held`: the product's stream waits until the exchange may start too, so that this one gets its processors first.
    for (const bool held : {false, true}) {
      const auto aside = [&](const auto& kernel, int first) {
        cudaEventRecord(ready_, main_);
        cudaStreamWaitEvent(side_, ready_);
        if (held) {
          cudaEventRecord(ready_, side_);
          cudaStreamWaitEvent(main_, ready_);
        }
        marks.mark(first, side_);
        kernel();
        marks.mark(first + 1, side_);
        cudaEventRecord(done_, side_);
      };
      repeat(marks, [&] {
        mark(0);
        own_tokens_.copy_(tokens_);
        aside([&] { launch_plan_and_pull(x_, epoch(), blocks, plan(), rows, weights, side_); }, 8);
        mark(1);
        multiply();
        mark(2);
        cudaStreamWaitEvent(main_, done_);
        mark(3);
        aside([&] { launch_combine(x_, epoch(), blocks, rows, side_); }, 10);
        mark(4);
        multiply();
        mark(5);
        cudaStreamWaitEvent(main_, done_);
        mark(6);
        add_partials();
        mark(7);
      });
      say("     + GEMMs{}  {:.0f} us, {:.0f} added; the GEMMs take {:.0f} more, then waits of {:.0f} and {:.0f}; plan "
          "and "
          "pull {:.0f}, combine {:.0f}",
          held ? ", held" : "      ", us(0, 7), us(0, 7) - products_, us(1, 2) + us(4, 5) - products_, us(2, 3),
          us(5, 6), us(8, 9), us(10, 11));
    }
  }

  Bootstrap& bootstrap_;
  Communicator& group_;
  at::Device device_;
  c10::cuda::CUDAStream main_, side_;
  Exchange x_;
  NcclWindow nccl_;
  IpcWindow ipc_;
  int64_t window_bytes_ = 0, real_rows_ = 0;
  double sent_bytes_ = 0, products_ = 0;
  uint32_t epoch_ = 0;
  cudaEvent_t ready_ = nullptr, done_ = nullptr;
  Tensor left_, right_, product_;   // [8192, 8192]
  Tensor choices_, weights_;        // [T, k]
  Tensor counts_;                   // [1, E] of the choices
  Tensor tokens_, residual_;        // [T, H]
  Tensor rows_, row_weights_;       // [ranks · T · k, H], [ranks · T · k]
  Tensor offsets_, rows_of_token_;  // [E / ranks], [T, ranks]
  Tensor own_tokens_, partials_;    // in the window
};

int run(bool ipc) {
  const std::unique_ptr<Bootstrap> bootstrap = make_bootstrap();
  const int64_t ranks = bootstrap->size();
  MARROW_CHECK(ranks >= 2 && ranks <= kMaxRanks && kExperts % ranks == 0 && bootstrap->ranks_on_host() == ranks,
               ExitCode::kUsage, Fix("mpirun -n 2 bench_nvlink, on one host"), "{} ranks, {} of this host", ranks,
               bootstrap->ranks_on_host());
  const at::Device device = use_gpu(bootstrap->local_rank());
  const c10::cuda::CUDAGuard guard(device);
  const at::NoGradGuard no_grad;
  std::vector<int64_t> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), int64_t{0});
  const std::string identity = bootstrap->broadcast(bootstrap->rank() == 0 ? new_nccl_identity() : "", 0);
  const auto group = make_nccl_communicator("expert", all, bootstrap->rank(), identity, device, nullptr);
  Experiment experiment(*bootstrap, *group, device);
  experiment.open_window(ipc, 16384);
  if (bootstrap->rank() == 0) fmt::print("windows by {}\n", ipc ? "CUDA's handles" : "NCCL");
  experiment.measure_meeting();
  int64_t wrong = 0;
  for (const int64_t tokens : {4096, 16384}) {
    for (const bool skewed : {true, false}) wrong += experiment.run(tokens, skewed);
  }
  experiment.close_window(ipc);
  if (wrong > 0) fail(fmt::format("{} values differ", wrong));
  if (bootstrap->rank() == 0) fmt::print("PASS every value is today's\n");
  return 0;
}

}  // namespace
}  // namespace marrow::nvlink

int main(int count, char** arguments) {
  alarm(150);  // a hang ends here at the latest
  try {
    return marrow::nvlink::run(count > 1 && std::string_view(arguments[1]) == "ipc");
  } catch (const marrow::Error& error) {
    fmt::print("{}", error.to_text());
    marrow::nvlink::fail(error.what());
  } catch (const std::exception& error) {
    marrow::nvlink::fail(error.what());
  }
}
