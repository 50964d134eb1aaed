#include "pipeline/micro_batch.h"

#include "ops/device.h"
#include "parallel/context_attention.h"

namespace marrow {

MicroBatch make_micro_batch(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                            std::span<const int32_t> document_start, int64_t sequences, int64_t seq_len, bool documents,
                            at::Device device, int64_t cp, int64_t c) {
  const std::vector<int64_t> kept = zigzag_positions(seq_len, cp, c);
  std::vector<int32_t> own_tokens, own_targets, positions, offsets;
  for (int64_t s = 0; s < sequences; ++s) {
    for (const int64_t i : kept) {
      const int64_t at = s * seq_len + i;
      own_tokens.push_back(tokens[at]);
      own_targets.push_back(targets[at]);
      positions.push_back(static_cast<int32_t>(i) - (documents ? document_start[at] : 0));
    }
    for (int64_t i = 0; documents && i < seq_len; ++i) {
      if (document_start[s * seq_len + i] == i || i == 0) offsets.push_back(static_cast<int32_t>(s * seq_len + i));
    }
  }
  MicroBatch batch;
  batch.tokens = to_device(own_tokens, device);
  batch.targets = to_device(own_targets, device);
  batch.context.positions = to_device(positions, device);
  batch.context.attention.sequences = sequences;
  batch.context.attention.seq_len = seq_len;
  if (documents) {
    offsets.push_back(static_cast<int32_t>(tokens.size()));
    batch.context.attention.document_offsets = std::move(offsets);
  }
  return batch;
}

}  // namespace marrow
