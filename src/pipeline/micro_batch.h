// One micro-batch on the device: what the stages of the model read.
#pragma once
#include "models/model_contract.h"
#include "ops/pch.h"

namespace marrow {

struct MicroBatch {
  at::Tensor tokens;   // [T] int32
  at::Tensor targets;  // [T] int32, -1 = not trained
  LayerContext context;
};

// A batch of whole sequences as the loader gives it (each [sequences, seq_len], row-major), made ready
// for `device`: of each sequence the tokens of context rank `c` of `cp` (parallel/context_attention.h),
// with positions and attention layout of the whole. `documents`: attention and positions restart where
// document_start says. Copies are queued, and do not wait for the device.
MicroBatch make_micro_batch(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                            std::span<const int32_t> document_start, int64_t sequences, int64_t seq_len, bool documents,
                            at::Device device, int64_t cp = 1, int64_t c = 0);

}  // namespace marrow
