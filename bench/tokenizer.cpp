// Megabytes of text a second on one core, token ids by the way: bench_tokenizer TOKENIZER TEXTS.
// TEXTS holds u32 count, then u32 bytes and UTF-8 for each text (tests/oracle/tokenizer_speed.py
// writes it, and prints the reference's speed beside ours).
#include <chrono>
#include <cstring>

#include "base/files.h"
#include "base/json.h"
#include "data/tokenizer.h"

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int run(const std::string& tokenizer_path, const std::string& texts_path) {
  const auto opening = std::chrono::steady_clock::now();
  const auto tokenizer = marrow::open_tokenizer(tokenizer_path);
  const double open_seconds = seconds_since(opening);

  const std::string file = marrow::read_text_file(texts_path);
  size_t at = 4, bytes = 0, tokens = 0;
  uint32_t count = 0;
  std::memcpy(&count, file.data(), 4);
  std::vector<int32_t> ids;
  const auto start = std::chrono::steady_clock::now();
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t size = 0;
    std::memcpy(&size, file.data() + at, 4);
    ids.clear();
    tokenizer->encode(std::string_view(file).substr(at + 4, size), ids);
    at += 4 + size;
    bytes += size;
    tokens += ids.size();
  }
  const double seconds = seconds_since(start);
  const std::string result = marrow::JsonWriter()
                                 .field("open_seconds", open_seconds)
                                 .field("bytes", static_cast<int64_t>(bytes))
                                 .field("tokens", static_cast<int64_t>(tokens))
                                 .field("seconds", seconds)
                                 .field("mb_per_second", static_cast<double>(bytes) / 1e6 / seconds)
                                 .text();
  std::puts(result.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: bench_tokenizer TOKENIZER TEXTS\n", stderr);
    return 2;
  }
  try {
    return run(argv[1], argv[2]);
  } catch (const marrow::Error& error) {
    std::fputs(error.to_text().c_str(), stderr);
    return static_cast<int>(error.report().code);
  }
}
