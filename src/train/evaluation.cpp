#include "train/evaluation.h"

#include <unistd.h>

namespace marrow {

MicroBatch to_micro_batch(const SequenceBatch& batch, const Mesh& mesh, at::Device device) {
  return make_micro_batch(batch.tokens, batch.targets, batch.document_start, batch.sequences, batch.seq_len,
                          batch.mask_documents, device, mesh.shape.cp, mesh.c);
}

EvaluationResult evaluate_corpus(Executor& executor, const BatchLoader& loader, at::Device device, int64_t sequences,
                                 int64_t micro_batch, Logger& logger, const Mesh& mesh, Communicator* world,
                                 StopSignal* stop) {
  // All ranks run equally many micro-batches of one size; sequences past the end have no target.
  const int64_t ranks = mesh.data_ranks(), size = std::min(micro_batch, (sequences + ranks - 1) / ranks);
  const int64_t unit = size * ranks;
  const int64_t micro_batches = (sequences + unit - 1) / unit;
  double targets = 0;
  const auto start = std::chrono::steady_clock::now();
  double next_progress = 0.5;  // seconds since the start
  const auto show_progress = [&](int64_t done) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (done == 0 || seconds < next_progress) return;
    next_progress = seconds + (isatty(STDERR_FILENO) == 1 ? 0.5 : 10.0);
    const double left = static_cast<double>(micro_batches - done) / static_cast<double>(done);
    logger.progress(fmt::format("evaluate {:5.1f}%  {} of {} micro-batches  {:.0f} s left", 100 / (1 + left), done,
                                micro_batches, left * seconds));
  };
  const auto load = [&](int64_t index) {
    show_progress(index);
    const int64_t first = (index * ranks + mesh.data_rank()) * size;
    SequenceBatch batch = loader.load(first, size);
    const int64_t kept = std::clamp<int64_t>(sequences - first, 0, size) * batch.seq_len;
    std::fill(batch.targets.begin() + kept, batch.targets.end(), -1);
    if (mesh.p == 0 && mesh.c == 0) targets += std::ranges::count_if(batch.targets, [](int32_t t) { return t >= 0; });
    return to_micro_batch(batch, mesh, device);
  };
  // The device is waited for after each batch, and a pipeline filled anew: that should take little of it.
  const int64_t batch = stop == nullptr ? micro_batches : std::max<int64_t>(8, 4 * mesh.shape.pp);
  at::Tensor sums = at::zeros({3}, at::TensorOptions().device(device).dtype(at::kDouble));  // loss, targets, stops
  for (int64_t first = 0; first < micro_batches; first += batch) {
    const int64_t count = std::min(batch, micro_batches - first);
    sums[0] += executor.evaluate(count, [&](int64_t index) { return load(first + index); })[0];
    if (first + count == micro_batches) break;
    sums[2].fill_(stop->requested() ? 1.0 : 0.0);
    if (world != nullptr) world->all_reduce(sums.narrow(0, 2, 1)).wait();
    if (sums[2].item<double>() > 0) return {.stopped = true};
  }
  sums[1].fill_(targets);
  if (world != nullptr) world->all_reduce(sums).wait();
  sums = sums.cpu();
  EvaluationResult result;
  result.targets = static_cast<int64_t>(sums[1].item<double>());
  MARROW_CHECK(result.targets > 0, ExitCode::kBadInput, Fix("give a longer corpus, or lower the sequence length"),
               "no target token in {} sequences", sequences);
  result.loss = sums[0].item<double>() / static_cast<double>(result.targets);
  MARROW_CHECK(std::isfinite(result.loss), ExitCode::kDiverged,
               Fix("use an earlier checkpoint: these weights are damaged, or their run diverged"), "the loss is {}",
               result.loss);
  return result;
}

}  // namespace marrow
