// Reading a family's config.json strictly: errors name the key, its value and what fits.
#pragma once
#include "base/json.h"

namespace marrow {

bool given(const Json& config, const char* key);  // there, and not null

// Error unless low ≤ value ≤ high, which config has under `key`.
void check_within(const Json& config, const char* key, double value, double low, double high);

// The whole number under `key`, from `lowest` to `highest`.
int64_t size_of(const Json& config, const char* key, double highest = 1 << 24, double lowest = 1);

// Error unless the number under `by` divides that under `key`.
void check_divides(const Json& config, const char* key, const char* by);

}  // namespace marrow
