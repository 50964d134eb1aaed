// Mean loss of a model over a corpus.
#pragma once
#include "base/log.h"
#include "base/stop_signal.h"
#include "data/batch_loader.h"
#include "pipeline/executor.h"

namespace marrow {

// What the rank at `mesh` reads of a batch.
MicroBatch to_micro_batch(const SequenceBatch& batch, bool mask_documents, const Mesh& mesh, at::Device device);

struct EvaluationSizes {
  int64_t sequences = 0;    // the first so many of the loader
  int64_t micro_batch = 1;  // sequences at once
  bool mask_documents = false;
};

struct EvaluationResult {
  double loss = 0;  // mean over targets, in nats
  int64_t targets = 0;
  bool stopped = false;  // before its end: there is no loss
};

// Waits for the device; shows progress. Data ranks take their share of the micro-batches; every rank of `world` (null:
// this one alone) calls it and gets the same result. `stop` is asked between batches: where it asks on any rank, all
// end after the same batch. Error (kBadInput) where no target is left.
EvaluationResult evaluate_corpus(Executor& executor, const BatchLoader& loader, at::Device device,
                                 const EvaluationSizes& sizes, Logger& logger, const Mesh& mesh = {},
                                 Communicator* world = nullptr, StopSignal* stop = nullptr);

}  // namespace marrow
