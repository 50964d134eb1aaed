// TensorBoard event files: TFRecord frames around protobuf messages, both written by hand.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/files.h"

namespace marrow {

struct TensorboardScalar {
  std::string tag;
  double value = 0;  // stored as a 32-bit float
};

class TensorboardWriter {
 public:
  // Creates a new event file in `dir`. Readers forget what older files hold after `resumed_step`.
  TensorboardWriter(const std::string& dir, int64_t resumed_step);
  void write(int64_t step, const std::vector<TensorboardScalar>& scalars);

 private:
  void append_record(const std::string& event);
  OutputFile file_;
};

// CRC-32C (Castagnoli) of `bytes`, for tests of the framing.
uint32_t crc32c(std::string_view bytes);

}  // namespace marrow
