// Qwen3.5-MoE, its language model (model_type qwen3_5_moe_text, or the text_config of a qwen3_5_moe): gated DeltaNet
// layers mixed with gated full attention, a shared expert behind a gate, norms that store how far their factors are
// from 1.
#pragma once
#include "models/model_contract.h"

namespace marrow {

std::unique_ptr<MoeModel> open_qwen3_5_moe(const Json& config);  // of the language model alone

}  // namespace marrow
