// Continuing a text, token by token, with a cache of keys and values.
#pragma once
#include "pipeline/executor.h"

namespace marrow {

struct GenerationOptions {
  int64_t max_tokens = 64;
  double temperature = 0.0;  // 0: always the likeliest token (ties: the lowest id)
  int64_t seed = 0;
  int64_t stop_token = -1;  // ends the text, and is not part of it; -1: none
  int64_t token_limit = 0;  // ids from here on are never chosen (padding of the vocabulary); 0: none
};

// The new tokens after `prompt` (not empty), at most max_tokens and what max_position leaves.
std::vector<int32_t> generate_tokens(Executor& executor, const MoeModel& model, at::Device device,
                                     std::vector<int32_t> prompt, const GenerationOptions& options);

}  // namespace marrow
