#include "pipeline/micro_batch.h"

namespace marrow {
namespace {

at::Tensor to_device(std::span<const int32_t> values, at::Device device) {
  const at::Tensor host = at::empty({static_cast<int64_t>(values.size())},
                                    at::TensorOptions().dtype(at::kInt).pinned_memory(device.is_cuda()));
  std::copy(values.begin(), values.end(), host.data_ptr<int32_t>());
  return device.is_cuda() ? host.to(device, /*non_blocking=*/true) : host;
}

}  // namespace

MicroBatch make_micro_batch(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                            std::span<const int32_t> document_start, int64_t sequences, int64_t seq_len, bool documents,
                            at::Device device) {
  MicroBatch batch;
  batch.tokens = to_device(tokens, device);
  batch.targets = to_device(targets, device);
  batch.context.attention.sequences = sequences;
  batch.context.attention.seq_len = seq_len;

  std::vector<int32_t> positions(tokens.size());
  std::vector<int32_t> offsets;
  for (int64_t s = 0; s < sequences; ++s) {
    for (int64_t i = 0; i < seq_len; ++i) {
      const int64_t at = s * seq_len + i;
      const int32_t start = documents ? document_start[at] : 0;
      positions[at] = static_cast<int32_t>(i) - start;
      if (positions[at] == 0) offsets.push_back(static_cast<int32_t>(at));
    }
  }
  batch.context.positions = to_device(positions, device);
  if (documents) {
    offsets.push_back(static_cast<int32_t>(tokens.size()));
    batch.context.attention.document_offsets = std::move(offsets);
  }
  return batch;
}

}  // namespace marrow
