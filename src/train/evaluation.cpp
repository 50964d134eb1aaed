#include "train/evaluation.h"

namespace marrow {

EvaluationResult evaluate_corpus(Executor& executor, const BatchLoader& loader, at::Device device,
                                 const EvaluationSizes& sizes) {
  const at::Tensor sum = at::zeros({1}, at::TensorOptions().device(device).dtype(at::kDouble));
  EvaluationResult result;
  for (int64_t first = 0; first < sizes.sequences; first += sizes.micro_batch) {
    const int64_t count = std::min(sizes.micro_batch, sizes.sequences - first);
    const SequenceBatch batch = loader.load(first, count);
    result.targets +=
        std::count_if(batch.targets.begin(), batch.targets.end(), [](int32_t target) { return target >= 0; });
    sum.add_(executor.evaluate(make_micro_batch(batch.tokens, batch.targets, batch.document_start, batch.sequences,
                                                batch.seq_len, sizes.mask_documents, device)));
  }
  MARROW_CHECK(result.targets > 0, ExitCode::kBadInput, Fix("give a longer corpus, or lower the sequence length"),
               "no target token in {} sequences", sizes.sequences);
  result.loss = sum.item<double>() / static_cast<double>(result.targets);
  MARROW_CHECK(std::isfinite(result.loss), ExitCode::kDiverged,
               Fix("use an earlier checkpoint: these weights are damaged, or their run diverged"), "the loss is {}",
               result.loss);
  return result;
}

}  // namespace marrow
