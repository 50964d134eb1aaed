// What must hold between the keys of a run config, apart from each key's own range.
#pragma once
#include "train/pretrain_config.h"

namespace marrow {

// Errors (kUsage) name the keys, their values and the nearest ones that fit. A mesh dimension that
// is still "auto" counts as 1.
void check_config(const PretrainConfig& config);

}  // namespace marrow
