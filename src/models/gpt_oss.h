// GPT-OSS (model_type gpt_oss): grouped-query attention with learned sinks, on some layers within a sliding window;
// YaRN; softmax over the chosen experts' logits; clamped SwiGLU experts; biases everywhere but in embedding, head and
// norms.
#pragma once
#include "models/model_contract.h"

namespace marrow {

std::unique_ptr<MoeModel> open_gpt_oss(const Json& config);

}  // namespace marrow
