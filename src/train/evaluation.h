// Mean loss of a model over a corpus.
#pragma once
#include "base/log.h"
#include "base/stop_signal.h"
#include "data/batch_loader.h"
#include "pipeline/executor.h"

namespace marrow {

// What the rank at `mesh` reads of a batch.
MicroBatch to_micro_batch(const SequenceBatch& batch, const Mesh& mesh, at::Device device);

struct EvaluationResult {
  double loss = 0;  // mean over targets, in nats
  int64_t targets = 0;
  bool stopped = false;  // before its end: there is no loss
};

// Of the first `sequences`, `micro_batch` at once. Waits for the device; shows progress. Data ranks take their share of
// the micro-batches; every rank of `world` (null: this one alone) calls it and gets the same result. `stop` is asked
// between batches: where it asks on any rank, all end after the same batch. Error (kBadInput) where no target is left.
EvaluationResult evaluate_corpus(Executor& executor, const BatchLoader& loader, at::Device device, int64_t sequences,
                                 int64_t micro_batch, Logger& logger, const Mesh& mesh = {},
                                 Communicator* world = nullptr, StopSignal* stop = nullptr);

}  // namespace marrow
