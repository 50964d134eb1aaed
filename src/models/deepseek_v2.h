// DeepSeek-V2, V2-Lite and V3 (also Moonlight): latent attention, shared experts, first layers dense. V2 routes by
// softmax, V3 by sigmoid scores with a bias of selection.
#pragma once
#include "models/model_contract.h"

namespace marrow {

std::unique_ptr<MoeModel> open_deepseek_v2(const Json& config);  // model_type deepseek_v2 or deepseek_v3

// Rotary frequencies of the model and YaRN's two corrections (1 without it).
struct DeepseekRope {
  std::vector<double> frequencies;  // [Dr/2]
  double table_scale = 1;           // of cos and sin
  double softmax_scale = 1;         // of the scores, beside 1/√(Dn + Dr)
};
DeepseekRope read_deepseek_rope(const Json& config);

}  // namespace marrow
