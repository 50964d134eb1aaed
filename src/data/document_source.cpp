#include "data/document_source.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/json.h"
#include "data/unicode_text.h"

namespace marrow {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

bool is_json_lines(std::string_view path) {
  return path.ends_with(".jsonl") || path.ends_with(".jsonl.gz") || path.ends_with(".jsonl.zst");
}

int64_t count_lines(std::string_view text) { return static_cast<int64_t>(std::count(text.begin(), text.end(), '\n')); }

void list_folder(const std::string& folder, std::vector<std::string>& files) {
  const size_t before = files.size();
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const bool hidden = entry->path().filename().string().starts_with('.');
    std::error_code ignored;  // a link that leads nowhere is no file
    if (hidden && entry->is_directory(ignored)) entry.disable_recursion_pending();
    if (!hidden && entry->is_regular_file(ignored)) files.push_back(entry->path().string());
  }
  MARROW_CHECK(!error, ExitCode::kUsage, Fix("check the folder's permissions"), "cannot list folder {}: {}", folder,
               error.message());
  MARROW_CHECK(files.size() > before, ExitCode::kUsage, Fix("give --input a folder with files"),
               "folder {} holds no file", folder);
  std::sort(files.begin() + static_cast<ptrdiff_t>(before), files.end());
}

// RFC 8259's grammar. Bytes above 0x7f, checked before, only appear in strings.
const std::string kGrammar = R"re((?(DEFINE)
  (?<space>  [ \t\r\n]*+ )
  (?<string> " (?: [^"\\\x00-\x1f]++ | \\ (?: ["\\/bfnrt] | u [0-9A-Fa-f]{4} ) )*+ " )
  (?<number> -? (?: 0 | [1-9][0-9]*+ ) (?: \. [0-9]++ )? (?: [eE] [+-]? [0-9]++ )? )
  (?<array>  \[ (?&space) (?: \] | (?&value) (?&space) (?: , (?&space) (?&value) (?&space) )*+ \] ) )
  (?<member> (?&space) (?&string) (?&space) : (?&space) (?&value) (?&space) )
  (?<object> \{ (?&space) (?: \} | (?&member) (?: , (?&member) )*+ \} ) )
  (?<value>  (?: (?&string) | (?&object) | (?&array) | (?&number) | true | false | null ) )
))re";

// A string as it stands in JSON, quotes included; nothing at half a surrogate pair.
std::optional<std::string> decode(std::string_view literal) {
  const std::string_view inner = literal.substr(1, literal.size() - 2);
  if (inner.find('\\') == std::string_view::npos) return std::string(inner);
  try {
    return Json::parse(literal, "a string").as_string();
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Of a line that the grammar refuses.
std::string what_is_wrong(std::string_view line) {
  try {
    Json::parse(line, "the line");
  } catch (const Error& error) {
    const std::string_view what = error.what();  // "… at line 1, column 5: syntax error …"
    return std::string(what.substr(std::min(what.find("column "), what.size()), 200));
  }
  return "the line is no JSON value";  // the library takes a little more than the standard
}

std::string bad_byte(std::string_view text, size_t at) {
  return fmt::format("byte {:#04x} at offset {}", static_cast<unsigned char>(text[at]), at);
}

Document text_document(std::string_view text) {
  if (text.empty()) return {{}, BadInput{input_fault::kEmptyDocument, 1, "the file is empty"}};
  const size_t valid = valid_utf8_length(text);
  if (valid == text.size()) return {text, {}};
  return {{}, BadInput{input_fault::kInvalidUtf8, 1 + count_lines(text.substr(0, valid)), bad_byte(text, valid)}};
}

}  // namespace

// The bytes of one file, decompressed. Whatever goes wrong ends the stream and is told by damage().
class ByteReader {
 public:
  explicit ByteReader(const std::string& path) : file_(gzopen(path.c_str(), "rb"), gzclose) {
    if (!file_) {
      damage_ = fmt::format("cannot open it: {}", std::strerror(errno));
      return;
    }
    gzbuffer(file_.get(), kReadBytes);
    if (path.ends_with(".gz") && gzdirect(file_.get()) != 0) damage_ = "it is no gzip data";
    if (path.ends_with(".zst")) {
      zstd_.reset(ZSTD_createDStream());
      ZSTD_DCtx_setParameter(zstd_.get(), ZSTD_d_windowLogMax, 31);  // files made with --long=31
    }
  }

  // Appends up to `bytes` bytes to `text`; false at the file's end or where it is damaged.
  bool append(std::string& text, int64_t bytes) {
    const size_t before = text.size();
    text.resize(before + static_cast<size_t>(bytes));
    size_t at = before;
    while (at < text.size() && !ended_ && damage_.empty()) {
      char* const out = text.data() + at;
      at += zstd_ ? decompress(out, text.size() - at) : read_file(out, text.size() - at);
    }
    text.resize(at);
    return at > before;
  }
  const std::string& damage() const { return damage_; }
  int64_t disk_bytes_read() const { return file_ ? gzoffset(file_.get()) : 0; }

 private:
  // zlib decompresses gzip data and hands all other files through as they are.
  size_t read_file(char* out, size_t size) {
    const int got = gzread(file_.get(), out, static_cast<unsigned>(size));
    if (got > 0) return static_cast<size_t>(got);
    ended_ = true;
    int error = Z_OK;
    const char* const message = gzerror(file_.get(), &error);
    if (error != Z_OK && error != Z_STREAM_END) damage_ = message;
    return 0;
  }

  size_t decompress(char* out, size_t size) {
    // Output may still be inside the decoder although all input was handed to it.
    if (input_.pos == input_.size && !output_pending_) {
      input_ = {compressed_.data(), read_file(compressed_.data(), compressed_.size()), 0};
      if (input_.size == 0) {
        if (damage_.empty() && !between_frames_) damage_ = "the compressed data are cut short";
        return 0;
      }
    }
    ZSTD_outBuffer output{out, size, 0};
    const size_t status = ZSTD_decompressStream(zstd_.get(), &output, &input_);
    if (ZSTD_isError(status)) damage_ = fmt::format("corrupt zstd data: {}", ZSTD_getErrorName(status));
    between_frames_ = status == 0;
    output_pending_ = status != 0 && output.pos == output.size;
    return output.pos;
  }

  static constexpr uint32_t kReadBytes = 256 << 10;
  std::unique_ptr<gzFile_s, int (*)(gzFile)> file_;
  std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> zstd_{nullptr, ZSTD_freeDStream};
  std::string compressed_ = std::string(kReadBytes, '\0');
  ZSTD_inBuffer input_{};
  bool between_frames_ = false, output_pending_ = false, ended_ = false;
  std::string damage_;
};

DocumentSource::DocumentSource(const std::vector<std::string>& inputs, const Limits& limits) : limits_(limits) {
  for (const std::string& input : inputs) {
    MARROW_CHECK(fs::exists(input), ExitCode::kUsage, Fix("check the path given to --input"), "input {} does not exist",
                 input);
    const bool is_folder = fs::is_directory(input);
    MARROW_CHECK(is_folder || fs::is_regular_file(input), ExitCode::kUsage,
                 Fix("write its text to a file, and give that to --input"),
                 "input {} is a pipe, a socket or a device: only files and folders are read", input);
    is_folder ? list_folder(input, files_) : files_.push_back(input);
  }
  for (const std::string& file : files_) {
    sizes_.push_back(static_cast<int64_t>(fs::file_size(file)));
    disk_bytes_ += sizes_.back();
  }
}

DocumentSource::~DocumentSource() = default;

int64_t DocumentSource::disk_bytes_read() const {
  return disk_bytes_done_ + (reader_ ? reader_->disk_bytes_read() : 0);
}

bool DocumentSource::next(InputBlock& block) {
  while (file_ < files_.size()) {
    if (!reader_) reader_ = std::make_unique<ByteReader>(files_[file_]);
    block = {files_[file_], std::exchange(rest_, {}), is_json_lines(files_[file_]), line_, {}};
    fill(block);
    if (!block.json_lines || !block.text.empty() || block.fault) return true;
  }
  return false;
}

// Whole lines, or a whole text file. None and a fault where one is too long: of its rest one block is held at a time.
void DocumentSource::fill(InputBlock& block) {
  std::string& text = block.text;
  size_t searched = 0;  // up to here `text` holds no line end
  const auto step = [&] {
    // Most text files are small: zero-filling a whole block for each would tell.
    constexpr int64_t kFirst = int64_t{32} << 10, kLargest = int64_t{1} << 24;
    return block.json_lines ? limits_.block_bytes : std::clamp(static_cast<int64_t>(text.size()), kFirst, kLargest);
  };
  while (reader_->append(text, step())) {
    const std::string_view fresh = std::string_view(text).substr(searched);
    const size_t newline = block.fault ? fresh.find('\n') : fresh.rfind('\n');
    if (block.json_lines && newline != std::string::npos) {
      rest_ = fresh.substr(newline + 1);
      text.resize(searched + newline + 1);
      line_ += count_lines(text);
      if (block.fault) text.clear();
      return;
    }
    if (static_cast<int64_t>(text.size()) > limits_.document_bytes) {
      block.fault = BadInput{input_fault::kTooLong, line_, fmt::format("more than {} bytes", limits_.document_bytes)};
      if (!block.json_lines) break;
    }
    if (block.fault) text.clear();
    searched = text.size();
  }
  if (!block.fault && !reader_->damage().empty()) {
    text.resize(text.rfind('\n') + 1);  // npos + 1 = 0: drops the cut line
    block.fault = BadInput{input_fault::kDamagedFile, line_ + count_lines(text), reader_->damage()};
  }
  if (block.fault && !block.json_lines) text.clear();  // a part of a document is none
  disk_bytes_done_ += sizes_[file_++];                 // also where the end was not read
  reader_.reset();
  line_ = 1;
}

JsonField find_json_string(std::string_view line, std::string_view field, RegexScratch& scratch) {
  static const Regex whole("(?x) \\A (?&space) (?&value) (?&space) \\z" + kGrammar, Regex::Unit::kBytes);
  static const Regex member(
      "(?x) \\G [{,] (?&space) (?<key> (?&string) ) (?&space) : (?&space) (?<text> (?&value) ) (?&space)" + kGrammar,
      Regex::Unit::kBytes);
  if (const size_t valid = valid_utf8_length(line); valid < line.size()) {
    return {input_fault::kInvalidUtf8, bad_byte(line, valid)};
  }
  try {
    if (!whole.find(line, 0, scratch)) return {input_fault::kNotJson, what_is_wrong(line)};
  } catch (const Error&) {
    return {input_fault::kNotJson, "it is nested too deeply"};
  }
  std::optional<std::string_view> literal;
  for (size_t at = line.find_first_not_of(" \t\r\n"); member.find(line, at, scratch); at = scratch.end()) {
    const auto group = [&](size_t index) {
      return line.substr(scratch.begin(index), scratch.end(index) - scratch.begin(index));
    };
    if (decode(group(1)) != field) continue;
    if (literal) return {input_fault::kNotJson, fmt::format("field \"{}\" appears twice", field)};
    literal = group(2);
  }
  if (!literal) return {input_fault::kMissingField, fmt::format("no field \"{}\"", field)};
  if (literal->front() != '"') return {input_fault::kMissingField, fmt::format("field \"{}\" is no string", field)};
  auto text = decode(*literal);
  if (!text) return {input_fault::kInvalidUtf8, fmt::format("half a surrogate pair in \"{}\"", field)};
  return {{}, std::move(*text)};
}

void read_documents(const InputBlock& block, const std::string& field,
                    const std::function<void(const Document&)>& visit) {
  std::string_view rest = block.text;
  if (!block.json_lines && !block.fault) visit(text_document(rest));
  if (block.json_lines) {
    RegexScratch scratch;
    if (block.first_line == 1 && rest.starts_with(kByteOrderMark)) rest.remove_prefix(3);
    for (int64_t number = block.first_line; !rest.empty(); ++number) {
      const std::string_view line = rest.substr(0, rest.find('\n'));
      rest.remove_prefix(std::min(line.size() + 1, rest.size()));
      if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      auto [fault, text] = find_json_string(line, field, scratch);
      if (fault.empty() && text.empty()) {
        fault = input_fault::kEmptyDocument;
        text = fmt::format("field \"{}\" is empty", field);
      }
      fault.empty() ? visit({text, {}}) : visit({{}, BadInput{fault, number, text}});
    }
  }
  if (block.fault) visit({{}, block.fault});
}

}  // namespace marrow
