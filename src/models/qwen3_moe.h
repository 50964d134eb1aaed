// Qwen3-MoE (model_type qwen3_moe): grouped-query attention with normalised queries and keys, RoPE,
// softmax top-k routing over SwiGLU experts.
#pragma once
#include "models/model_contract.h"

namespace marrow {

std::unique_ptr<MoeModel> open_qwen3_moe(const Json& config);

}  // namespace marrow
