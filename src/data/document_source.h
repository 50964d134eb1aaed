// Text inputs as a stream of documents: files, folders, JSON lines, gzip and zstd.
//
// What is read: *.jsonl (a document a line, its text in a field) and any other file as text (one document), either of
// them also as *.gz or *.zst. A folder stands for the files below it, in byte order of their paths, without hidden
// ones. Text is never changed; a byte order mark before the first JSON line and blank lines are no part of it.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "data/regex.h"

namespace marrow {

// Why an input gives no document. Each is skipped and counted, or ends the run (`--on-error`).
namespace input_fault {
constexpr std::string_view kInvalidUtf8 = "invalid UTF-8";  // or half a surrogate pair escaped in JSON
constexpr std::string_view kEmptyDocument = "empty document";
constexpr std::string_view kNotJson = "not JSON";
constexpr std::string_view kMissingField = "missing field";  // or it is no string
constexpr std::string_view kTooLong = "too long";            // over Limits::document_bytes
constexpr std::string_view kDamagedFile = "damaged file";    // truncated or corrupt: what precedes still counts
}  // namespace input_fault

struct BadInput {
  std::string_view fault;
  int64_t line;  // 1-based, within the (decompressed) file
  std::string detail;
};

// A stretch of one input file, small enough to be held in memory.
struct InputBlock {
  std::string path;
  std::string text;  // whole lines, or a whole text file
  bool json_lines = false;
  int64_t first_line = 1;
  std::optional<BadInput> fault;  // met behind `text`
};

class ByteReader;

// Reads inputs block by block. Memory: one block, or one document where that is larger.
class DocumentSource {
 public:
  struct Limits {
    int64_t block_bytes = int64_t{1} << 20;
    int64_t document_bytes = int64_t{512} << 20;
  };
  // Lists the files. Error (kUsage): one that does not exist or is a pipe, socket or device; a folder without files.
  DocumentSource(const std::vector<std::string>& inputs, const Limits& limits);
  ~DocumentSource();

  bool next(InputBlock& block);                       // false at the end
  int64_t disk_bytes() const { return disk_bytes_; }  // of all files, as they lie on disk
  int64_t disk_bytes_read() const;

 private:
  void fill(InputBlock& block);

  Limits limits_;
  std::vector<std::string> files_;
  std::vector<int64_t> sizes_;  // [files], bytes on disk
  int64_t disk_bytes_ = 0, disk_bytes_done_ = 0;
  size_t file_ = 0;  // index of the open file, or of the next one
  std::unique_ptr<ByteReader> reader_;
  std::string rest_;  // of a line whose end is not read yet
  int64_t line_ = 1;  // number of the line that rest_ belongs to
};

struct Document {
  std::string_view text;
  std::optional<BadInput> fault;  // then there is no text
};

// Calls visit(document) for the documents of one block, in order; its views live during the call.
void read_documents(const InputBlock& block, const std::string& field,
                    const std::function<void(const Document&)>& visit);

// One string of a JSON line, or why there is none.
struct JsonField {
  std::string_view fault;  // of input_fault; empty: none
  std::string text;        // the decoded string; with a fault, what is wrong
};

// Checks all of `line` against RFC 8259 and returns its top-level string `field`: kMissingField where it is absent or
// no string, kNotJson where it appears twice, kInvalidUtf8 where it escapes half a surrogate pair.
JsonField find_json_string(std::string_view line, std::string_view field, RegexScratch& scratch);

}  // namespace marrow
