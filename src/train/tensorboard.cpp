// TensorBoard event files.
#include "ops/pch.h"

#include <unistd.h>

#include <bit>
#include <chrono>
#include <filesystem>

#include "train/metrics.h"

namespace marrow {
namespace {

// Protobuf's encoding of one field: its number and wire type, then the value.
std::string little_endian(uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
  return out;
}
std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
std::string varint_field(uint64_t field, uint64_t value) { return varint(field << 3) + varint(value); }
std::string double_field(uint64_t field, double value) {
  return varint(field << 3 | 1) + little_endian(std::bit_cast<uint64_t>(value), 8);
}
std::string bytes_field(uint64_t field, const std::string& content) {
  return varint(field << 3 | 2) + varint(content.size()) + content;
}
std::string float_field(uint64_t field, float value) {
  return varint(field << 3 | 5) + little_endian(std::bit_cast<uint32_t>(value), 4);
}

// Of tensorflow's event.proto: wall_time 1, step 2, file_version 3, summary 5, session_log 7.
std::string event_head(int64_t step) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return double_field(1, now.count()) + varint_field(2, static_cast<uint64_t>(step));
}

uint32_t masked_crc(const std::string& bytes) {
  const uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

// Names sort by time, for readers take the files in that order; no two runs share one.
std::string new_event_file(const std::string& dir) {
  std::filesystem::create_directories(dir);
  char host[256] = "localhost";
  gethostname(host, sizeof host - 1);
  const auto now =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  return fmt::format("{}/events.out.tfevents.{}.{:03}.{}.{}", dir, now / 1000, now % 1000, host, getpid());
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      t[i] = i;
      for (int bit = 0; bit < 8; ++bit) t[i] = t[i] >> 1 ^ (t[i] & 1 ? 0x82F63B78u : 0u);
    }
    return t;
  }();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = crc >> 8 ^ table[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

TensorboardWriter::TensorboardWriter(const std::string& dir, int64_t resumed_step) : file_(new_event_file(dir)) {
  append_record(event_head(0) + bytes_field(3, "brain.Event:2"));
  // session_log's status 1: START
  append_record(event_head(resumed_step + 1) + bytes_field(7, varint_field(1, 1)));
}

void TensorboardWriter::write(int64_t step, const std::vector<TensorboardScalar>& scalars) {
  std::string summary;  // of values 1, each with tag 1 and simple_value 2
  for (const TensorboardScalar& scalar : scalars) {
    const float value = static_cast<float>(scalar.value);
    summary += bytes_field(1, bytes_field(1, scalar.tag) + float_field(2, value));
  }
  append_record(event_head(step) + bytes_field(5, summary));
}

void TensorboardWriter::append_record(const std::string& event) {
  const std::string length = little_endian(event.size(), 8);
  const std::string record =
      length + little_endian(masked_crc(length), 4) + event + little_endian(masked_crc(event), 4);
  file_.append(record);
}

}  // namespace marrow
