// Reading a family's config.json strictly: errors name the key, its value and what fits.
#pragma once
#include "models/model_contract.h"
#include "ops/qk_norm_rope.h"

namespace marrow {

bool given(const Json& config, const char* key);  // there, and not null

// Error: this value does not fit, set it to `supported`.
[[noreturn]] void refuse(const Json& value, const std::string& supported);

// Error unless `key`, where it is given, is this JSON.
void check_is(const Json& config, const char* key, const std::string& supported);

// Error where `object` has other keys, unless they are null.
void check_known(const Json& object, std::initializer_list<std::string_view> known);

// Error unless low ≤ value ≤ high, which config has under `key`.
void check_within(const Json& config, const char* key, double value, double low, double high);

// The whole number under `key`, from `lowest` to `highest`.
int64_t size_of(const Json& config, const char* key, double highest = 1 << 24, double lowest = 1);

// Error unless the number under `by` divides that under `key`.
void check_divides(const Json& config, const char* key, const char* by);

// Error unless RoPE can turn pairs of `size` elements, which config has under `key`.
void check_even(const Json& config, const char* key, int64_t size);

void refuse_quantised(const Json& config);

// What all families have alike, but for the experts. No family has another activation than silu, or dropout.
ModelShape read_shape(const Json& config);

// The same with the experts: num_experts, or num_local_experts of the Hub's other style.
ModelShape read_moe_shape(const Json& config);

// For each of layer_types' entries, one a layer: is it `yes`? It must be that or `no`.
std::vector<bool> read_layer_types(const Json& config, int64_t layers, const std::string& yes, const std::string& no);

// What config.json says of RoPE, as transformers 5 writes it in rope_parameters, without what is null: there, in
// rope_theta and rope_scaling ("type" for rope_type) of old, or in both. Error where the two disagree.
Json rope_parameters(const Json& config);

// Of the object that rope_parameters gave.
YarnScaling read_yarn(const Json& rope);
double yarn_magnitude(const YarnScaling& yarn, double mscale);

}  // namespace marrow
