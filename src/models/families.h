// The families that open_model chooses from, one file each.
#pragma once
#include "models/model_contract.h"

namespace marrow {

std::unique_ptr<MoeModel> open_qwen3_moe(const Json& config);
std::unique_ptr<MoeModel> open_deepseek_v2(const Json& config);  // model_type deepseek_v2 or deepseek_v3
std::unique_ptr<MoeModel> open_gpt_oss(const Json& config);
std::unique_ptr<MoeModel> open_qwen3_5_moe(const Json& config);  // of the language model alone

// DeepSeek's rotary frequencies, and YaRN's two corrections (1 without it).
struct DeepseekRope {
  std::vector<double> frequencies;  // [Dr/2]
  double table_scale = 1;           // of cos and sin
  double softmax_scale = 1;         // of the scores, beside 1/√(Dn + Dr)
};
DeepseekRope read_deepseek_rope(const Json& config);

}  // namespace marrow
