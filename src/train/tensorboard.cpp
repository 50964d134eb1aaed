#include "ops/pch.h"

#include "train/tensorboard.h"

#include <unistd.h>

#include <bit>
#include <chrono>
#include <filesystem>

namespace marrow {
namespace {

// Field numbers of tensorflow's event.proto and summary.proto.
constexpr int kEventWallTime = 1, kEventStep = 2, kEventFileVersion = 3, kEventSummary = 5,
              kEventSessionLog = 7, kSessionLogStatus = 1, kSummaryValue = 1, kValueTag = 1,
              kValueSimpleValue = 2;
constexpr uint64_t kSessionStart = 1;

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

enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string key(int field, WireType type) {
  return varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(type));
}

std::string bytes_field(int field, const std::string& content) {
  return key(field, kBytes) + varint(content.size()) + content;
}

std::string event_head(int64_t step) {
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  return key(kEventWallTime, kFixed64) + little_endian(std::bit_cast<uint64_t>(now), 8) +
         key(kEventStep, kVarint) + varint(static_cast<uint64_t>(step));
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
  const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  return fmt::format("{}/events.out.tfevents.{}.{:03}.{}.{}", dir, now / 1000, now % 1000, host,
                     getpid());
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

TensorboardWriter::TensorboardWriter(const std::string& dir, int64_t resumed_step)
    : file_(new_event_file(dir)) {
  append_record(event_head(0) + bytes_field(kEventFileVersion, "brain.Event:2"));
  const std::string start = key(kSessionLogStatus, kVarint) + varint(kSessionStart);
  append_record(event_head(resumed_step + 1) + bytes_field(kEventSessionLog, start));
}

void TensorboardWriter::write(int64_t step, const std::vector<TensorboardScalar>& scalars) {
  std::string summary;
  for (const TensorboardScalar& scalar : scalars) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(scalar.value));
    summary +=
        bytes_field(kSummaryValue, bytes_field(kValueTag, scalar.tag) +
                                       key(kValueSimpleValue, kFixed32) + little_endian(bits, 4));
  }
  append_record(event_head(step) + bytes_field(kEventSummary, summary));
}

void TensorboardWriter::append_record(const std::string& event) {
  const std::string length = little_endian(event.size(), 8);
  const std::string record =
      length + little_endian(masked_crc(length), 4) + event + little_endian(masked_crc(event), 4);
  file_.append(std::as_bytes(std::span(record)));
}

}  // namespace marrow
