// How routing is kept balanced; docs/architecture.md gives the formulas.
#pragma once

namespace marrow {

enum class BalanceMode { kNone, kMicro, kSequence, kGlobal, kBias };

}  // namespace marrow
