// Megabytes of text a second of one core: bench_tokenizer TOKENIZER TEXTS.
// TEXTS holds u32 count, then u32 bytes and UTF-8 for each text (tests/oracle/tokenizer_speed.py
// writes it, and prints the reference's speed beside ours).
#include <cstring>
#include <ctime>

#include "base/files.h"
#include "base/json.h"
#include "data/tokenizer.h"

namespace {

// Of this process: the same on a busy machine, and per core.
double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

int run(const std::string& tokenizer_path, const std::string& texts_path) {
  const double opening = cpu_seconds();
  const auto tokenizer = marrow::open_tokenizer(tokenizer_path);
  const double open_seconds = cpu_seconds() - opening;

  const std::string file = marrow::read_text_file(texts_path);
  size_t at = 4, bytes = 0, tokens = 0;
  uint32_t count = 0;
  std::memcpy(&count, file.data(), 4);
  std::vector<int32_t> ids;
  const double start = cpu_seconds();
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t size = 0;
    std::memcpy(&size, file.data() + at, 4);
    ids.clear();
    tokenizer->encode(std::string_view(file).substr(at + 4, size), ids);
    at += 4 + size;
    bytes += size;
    tokens += ids.size();
  }
  const double seconds = cpu_seconds() - start;
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
