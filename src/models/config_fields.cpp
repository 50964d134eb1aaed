#include "models/config_fields.h"

#include "base/error.h"

namespace marrow {

bool given(const Json& config, const char* key) { return config.has(key) && !config.at(key).is_null(); }

void check_within(const Json& config, const char* key, double value, double low, double high) {
  if (value >= low && value <= high) return;
  config.fail(fmt::format("{} = {} is not between {} and {}", key, value, low, high),
              Fix(fmt::format("set {} as the published models do", key)));
}

int64_t size_of(const Json& config, const char* key, double highest, double lowest) {
  check_within(config, key, config.at(key).as_double(), lowest, highest);
  return config.at(key).as_int();
}

void check_divides(const Json& config, const char* key, const char* by) {
  if (config.at(key).as_int() % config.at(by).as_int() == 0) return;
  config.at(by).fail(fmt::format("{} does not divide {} = {}", config.at(by).dump(), key, config.at(key).dump()),
                     Fix(fmt::format("set {} to a divisor of {}", by, key)));
}

}  // namespace marrow
