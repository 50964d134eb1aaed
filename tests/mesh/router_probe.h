// Sees every call of marrow::router in this process: the program is linked with --wrap for it.
#pragma once
#include <cstdint>
#include <vector>

namespace marrow::test {

// The least gap between a token's k-th and next logit, over all tokens and layers since the last call; infinity where
// nothing was routed. Where it is below rounding, two meshes may route that token to different experts.
double take_least_router_gap();

// From here on every token goes to these k experts, whatever its logits; empty: natural routing again.
void force_router(std::vector<int64_t> experts);

}  // namespace marrow::test
