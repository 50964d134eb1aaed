#include "data/document_source.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "data/text_scan.h"

namespace marrow {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

bool is_compressed(std::string_view path) {
  return path.ends_with(".gz") || path.ends_with(".zst");
}

bool is_json_lines(std::string_view path) {
  if (is_compressed(path)) path = path.substr(0, path.rfind('.'));
  return path.ends_with(".jsonl");
}

int64_t count_lines(std::string_view text) {
  return static_cast<int64_t>(std::count(text.begin(), text.end(), '\n'));
}

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
  MARROW_CHECK(!error, ExitCode::kUsage, Fix("check the folder's permissions"),
               "cannot list folder {}: {}", folder, error.message());
  MARROW_CHECK(files.size() > before, ExitCode::kUsage, Fix("give --input a folder with files"),
               "folder {} holds no file", folder);
  std::sort(files.begin() + static_cast<ptrdiff_t>(before), files.end());
}

struct FreeZstd {
  void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
};

}  // namespace

std::string_view fault_name(InputFault fault) {
  constexpr std::array<std::string_view, kInputFaults> kNames = {
      "invalid UTF-8", "empty document", "not JSON", "missing field", "too long", "damaged file"};
  return kNames[static_cast<size_t>(fault)];
}

// The bytes of one file, decompressed. Whatever goes wrong ends the stream and is told by damage().
class ByteReader {
 public:
  explicit ByteReader(const std::string& path)
      : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) damage_ = fmt::format("cannot open it: {}", std::strerror(errno));
    if (path.ends_with(".gz")) {
      // 16: gzip framing is expected. Fails only without memory.
      MARROW_CHECK(inflateInit2(&gzip_.emplace(), 15 + 16) == Z_OK, ExitCode::kDeviceFault,
                   Fix("free memory"), "zlib cannot start on {}", path);
    } else if (path.ends_with(".zst")) {
      zstd_.reset(ZSTD_createDStream());
      ZSTD_DCtx_setParameter(zstd_.get(), ZSTD_d_windowLogMax, 31);  // files made with --long=31
    }
    if (gzip_ || zstd_) compressed_.resize(size_t{256} << 10);
  }
  ~ByteReader() {
    if (gzip_) inflateEnd(&*gzip_);
    if (descriptor_ >= 0) close(descriptor_);
  }
  ByteReader(const ByteReader&) = delete;
  ByteReader& operator=(const ByteReader&) = delete;

  // Fills `out` as far as the file goes; 0 at its end or where it is damaged.
  size_t read(char* out, size_t size) {
    size_t done = 0;
    while (done < size && !ended_ && damage_.empty()) {
      const size_t got = gzip_   ? inflate_some(out + done, size - done)
                         : zstd_ ? decompress_some(out + done, size - done)
                                 : read_disk(out + done, size - done);
      done += got;
      if (got == 0 && !gzip_ && !zstd_) ended_ = true;
    }
    return done;
  }
  const std::string& damage() const { return damage_; }
  int64_t disk_bytes_read() const { return disk_bytes_read_; }

 private:
  size_t read_disk(char* out, size_t size) {
    ssize_t got = 0;
    do {
      got = ::read(descriptor_, out, size);
    } while (got < 0 && errno == EINTR);
    if (got < 0) damage_ = fmt::format("cannot read it: {}", std::strerror(errno));
    disk_bytes_read_ += std::max<ssize_t>(got, 0);
    return static_cast<size_t>(std::max<ssize_t>(got, 0));
  }

  // Makes compressed bytes available. Without any left, the stream must stand between two frames.
  bool refill() {
    if (at_ < filled_) return true;
    at_ = 0;
    filled_ = read_disk(compressed_.data(), compressed_.size());
    if (filled_ > 0) return true;
    if (damage_.empty() && !between_frames_) damage_ = "the compressed data are cut short";
    ended_ = true;
    return false;
  }

  size_t inflate_some(char* out, size_t size) {
    if (!refill()) return 0;
    if (between_frames_) inflateReset(&*gzip_);
    gzip_->next_in = reinterpret_cast<Bytef*>(compressed_.data() + at_);
    gzip_->avail_in = static_cast<uInt>(filled_ - at_);
    gzip_->next_out = reinterpret_cast<Bytef*>(out);
    gzip_->avail_out = static_cast<uInt>(std::min<size_t>(size, size_t{1} << 30));
    const uInt room = gzip_->avail_out;
    const int status = inflate(&*gzip_, Z_NO_FLUSH);
    at_ = filled_ - gzip_->avail_in;
    between_frames_ = status == Z_STREAM_END;
    if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR) {
      damage_ = fmt::format("corrupt gzip data: {}", gzip_->msg ? gzip_->msg : "unknown format");
    }
    return room - gzip_->avail_out;
  }

  size_t decompress_some(char* out, size_t size) {
    // Output may still be inside the decoder although all input was handed to it.
    if (!output_pending_ && !refill()) return 0;
    ZSTD_inBuffer input{compressed_.data(), filled_, at_};
    ZSTD_outBuffer output{out, size, 0};
    const size_t status = ZSTD_decompressStream(zstd_.get(), &output, &input);
    at_ = input.pos;
    if (ZSTD_isError(status)) {
      damage_ = fmt::format("corrupt zstd data: {}", ZSTD_getErrorName(status));
      return output.pos;
    }
    between_frames_ = status == 0;
    output_pending_ = status != 0 && output.pos == output.size;
    return output.pos;
  }

  int descriptor_;
  std::optional<z_stream> gzip_;
  std::unique_ptr<ZSTD_DStream, FreeZstd> zstd_;
  std::string compressed_;
  size_t at_ = 0, filled_ = 0;  // of compressed_
  bool between_frames_ = false, output_pending_ = false, ended_ = false;
  std::string damage_;
  int64_t disk_bytes_read_ = 0;
};

DocumentSource::DocumentSource(const std::vector<std::string>& inputs)
    : DocumentSource(inputs, Limits{}) {}

DocumentSource::DocumentSource(const std::vector<std::string>& inputs, const Limits& limits)
    : limits_(limits) {
  list_files(inputs);
}

DocumentSource::~DocumentSource() = default;

void DocumentSource::list_files(const std::vector<std::string>& inputs) {
  for (const std::string& input : inputs) {
    MARROW_CHECK(fs::exists(input), ExitCode::kUsage, Fix("check the path given to --input"),
                 "input {} does not exist", input);
    fs::is_directory(input) ? list_folder(input, files_) : files_.push_back(input);
  }
  for (const std::string& file : files_) {
    std::error_code error;  // a pipe has no size
    const auto size = fs::file_size(file, error);
    sizes_.push_back(error ? 0 : static_cast<int64_t>(size));
    disk_bytes_ += sizes_.back();
  }
}

int64_t DocumentSource::disk_bytes_read() const {
  return disk_bytes_done_ + (reader_ ? reader_->disk_bytes_read() : 0);
}

bool DocumentSource::next(InputBlock& block) {
  while (file_ < files_.size()) {
    if (!reader_) open_file();
    block = InputBlock{.path = files_[file_],
                       .text = {},
                       .json_lines = is_json_lines(files_[file_]),
                       .first_line = line_,
                       .fault = {}};
    if (block.json_lines ? next_lines(block) : next_text(block)) return true;
  }
  return false;
}

void DocumentSource::open_file() {
  reader_ = std::make_unique<ByteReader>(files_[file_]);
  line_ = 1;
  rest_.clear();
}

void DocumentSource::close_file() {
  disk_bytes_done_ += sizes_[file_];  // also where the end was not read
  reader_.reset();
  ++file_;
  line_ = 1;
}

size_t DocumentSource::read_more(std::string& text, int64_t bytes) {
  const size_t before = text.size();
  text.resize(before + static_cast<size_t>(bytes));
  const size_t got = reader_->read(text.data() + before, text.size() - before);
  text.resize(before + got);
  return got;
}

bool DocumentSource::next_text(InputBlock& block) {
  const auto limit = static_cast<size_t>(limits_.document_bytes);
  const auto step = [&] {  // most files are small: zero-filling a whole block for each would tell
    constexpr int64_t kFirst = int64_t{32} << 10;
    return std::clamp(static_cast<int64_t>(block.text.size()), kFirst, int64_t{1} << 24);
  };
  while (block.text.size() <= limit && read_more(block.text, step()) > 0) continue;
  if (block.text.size() > limit) {
    block.fault = BadInput{InputFault::kTooLong, 1,
                           fmt::format("a document of more than {} bytes", limits_.document_bytes)};
  } else if (!reader_->damage().empty()) {
    block.fault =
        BadInput{InputFault::kDamagedFile, 1 + count_lines(block.text), reader_->damage()};
  }
  if (block.fault) block.text.clear();  // a part of a document is none
  close_file();
  return true;
}

bool DocumentSource::next_lines(InputBlock& block) {
  block.text = std::move(rest_);
  rest_.clear();
  const bool first_of_file = line_ == 1;
  size_t searched = 0;  // up to here block.text holds no line end
  while (read_more(block.text, limits_.block_bytes) > 0) {
    const size_t newline = std::string_view(block.text).substr(searched).rfind('\n');
    if (newline != std::string::npos) {
      rest_ = block.text.substr(searched + newline + 1);
      block.text.resize(searched + newline + 1);
      line_ += count_lines(block.text);
      if (first_of_file && block.text.starts_with(kByteOrderMark)) block.text.erase(0, 3);
      return true;
    }
    searched = block.text.size();
    if (static_cast<int64_t>(searched) > limits_.document_bytes) {
      skip_line(block);
      return true;
    }
  }
  if (!reader_->damage().empty()) {
    block.text.resize(block.text.rfind('\n') + 1);  // npos + 1 = 0: drops the cut line
    block.fault =
        BadInput{InputFault::kDamagedFile, line_ + count_lines(block.text), reader_->damage()};
  }
  if (first_of_file && block.text.starts_with(kByteOrderMark)) block.text.erase(0, 3);
  close_file();
  return !block.text.empty() || block.fault;
}

// Drops the line that block.text has begun, holding no more than a block of it.
void DocumentSource::skip_line(InputBlock& block) {
  block.text.clear();
  block.text.shrink_to_fit();
  block.fault = BadInput{InputFault::kTooLong, line_,
                         fmt::format("a line of more than {} bytes", limits_.document_bytes)};
  while (true) {
    rest_.clear();
    if (read_more(rest_, limits_.block_bytes) == 0)
      return;  // the next call meets the end of the file
    const size_t newline = rest_.find('\n');
    if (newline == std::string::npos) continue;
    rest_.erase(0, newline + 1);
    ++line_;
    return;
  }
}

bool DocumentCursor::next(Item& item) {
  item = {};
  if (!ended_ && (block_.json_lines ? next_line(item) : next_text(item))) return true;
  const bool fault_is_new = !ended_ && block_.fault;
  ended_ = true;
  item.fault = fault_is_new ? block_.fault : std::nullopt;
  return fault_is_new;
}

bool DocumentCursor::next_text(Item& item) {
  if (at_ > 0 || block_.fault) return false;
  at_ = 1;
  const std::string_view text = block_.text;
  const size_t valid = valid_utf8_length(text);
  if (text.empty()) {
    item.fault = BadInput{InputFault::kEmptyDocument, 1, "the file is empty"};
  } else if (valid < text.size()) {
    item.fault = BadInput{InputFault::kInvalidUtf8, 1 + count_lines(text.substr(0, valid)),
                          fmt::format("byte {:#04x} at offset {} of the file",
                                      static_cast<unsigned char>(text[valid]), valid)};
  } else {
    item.text = text;
  }
  return true;
}

bool DocumentCursor::next_line(Item& item) {
  const std::string_view text = block_.text;
  while (at_ < text.size()) {
    const size_t end = std::min(text.find('\n', at_), text.size());
    const std::string_view line = text.substr(at_, end - at_);
    at_ = end + 1;
    const bool blank = line.find_first_not_of(" \t\r") == std::string_view::npos;
    if (!blank) read_line(line, item);
    ++line_;
    if (!blank) return true;
  }
  return false;
}

void DocumentCursor::read_line(std::string_view line, Item& item) {
  using Status = JsonField::Status;
  const auto fail = [&](InputFault fault, std::string detail) {
    item.fault = BadInput{fault, line_, std::move(detail)};
  };
  const size_t valid = valid_utf8_length(line);
  if (valid < line.size()) {
    return fail(InputFault::kInvalidUtf8,
                fmt::format("byte {:#04x} at offset {} of the line",
                            static_cast<unsigned char>(line[valid]), valid));
  }
  JsonField field = find_json_string(line, field_, scratch_);
  if (field.status == Status::kNotJson) return fail(InputFault::kNotJson, field.detail);
  if (field.status == Status::kMissing) return fail(InputFault::kMissingField, field.detail);
  if (field.status == Status::kLoneSurrogate) return fail(InputFault::kInvalidUtf8, field.detail);
  if (field.text.empty()) {
    return fail(InputFault::kEmptyDocument, fmt::format("field \"{}\" is empty", field_));
  }
  item.text = field.text;
}

}  // namespace marrow
