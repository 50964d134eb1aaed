#include "data/tokenize_corpus.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "data/indexed_corpus.h"

namespace marrow {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kBytesInFlight = int64_t{64} << 20;
constexpr int64_t kWarnings = 10;

// What became of one block.
struct EncodedBlock {
  std::string path;
  std::vector<int32_t> ids, lengths;
  std::vector<BadInput> faults;
  int64_t bytes = 0;        // of the documents
  int64_t block_bytes = 0;  // what it counts for against kBytesInFlight
};

// Workers take numbered blocks from the source in turn, encode them side by side, and hand them in; whoever hands in
// the next block in order writes it and its finished successors.
class Pipeline {
 public:
  Pipeline(const TokenizeOptions& options, const Tokenizer& tokenizer, Logger& logger)
      : options_(options),
        tokenizer_(tokenizer),
        logger_(logger),
        source_(options.inputs, options.limits),
        writer_(options.output,
                {.tokenizer = tokenizer.name(),
                 .tokenizer_hash = tokenizer.hash(),
                 .vocab_size = tokenizer.vocab_size(),
                 .end_of_document = options.append_end_of_document ? tokenizer.end_of_document() : std::nullopt},
                options.overwrite) {}

  TokenizeResult run() {
    {
      const int64_t workers = options_.workers > 0 ? options_.workers : std::thread::hardware_concurrency();
      std::vector<std::jthread> threads;
      for (int64_t i = 1; i < workers; ++i) threads.emplace_back([this] { work(); });
      work();
    }
    if (failure_) std::rethrow_exception(failure_);
    result_.documents = writer_.documents();
    result_.tokens = writer_.tokens();
    MARROW_CHECK(result_.documents > 0, ExitCode::kBadInput, Fix("give --input text, or the right --field"),
                 "the input holds no document ({} were skipped)", result_.skipped);
    writer_.finish();
    result_.seconds = seconds();
    std::vector<std::string> kinds;
    for (const auto& [kind, count] : result_.faults) kinds.push_back(fmt::format("{} {}", count, kind));
    if (result_.skipped > 0) {
      logger_.warn(fmt::format("skipped {} inputs: {}", result_.skipped, fmt::join(kinds, "; ")));
    }
    return result_;
  }

 private:
  void work() {
    try {
      InputBlock block;
      int64_t number = 0;
      while (take(block, number)) hand_in(number, encode(block));
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
      room_.notify_all();
    }
  }

  // The next block, once few enough bytes are in flight; false at the end or after a failure.
  bool take(InputBlock& block, int64_t& number) {
    const std::lock_guard one_reader(source_mutex_);
    {
      std::unique_lock lock(mutex_);
      room_.wait(lock, [&] { return bytes_in_flight_ < kBytesInFlight || failure_; });
      if (failure_) return false;
    }
    if (!source_.next(block)) return false;
    const std::lock_guard lock(mutex_);
    number = blocks_taken_++;
    bytes_in_flight_ += static_cast<int64_t>(block.text.size());
    disk_bytes_read_ = source_.disk_bytes_read();
    return true;
  }

  EncodedBlock encode(const InputBlock& block) const {
    EncodedBlock out;
    out.path = block.path;
    out.block_bytes = static_cast<int64_t>(block.text.size());
    read_documents(block, options_.field, [&](const Document& document) {
      if (document.fault) return out.faults.push_back(*document.fault);
      const size_t before = out.ids.size();
      tokenizer_.encode(document.text, out.ids);
      if (options_.append_end_of_document) out.ids.push_back(*tokenizer_.end_of_document());
      const size_t length = out.ids.size() - before;
      MARROW_CHECK(length <= INT32_MAX, ExitCode::kBadInput, Fix("split this document"),
                   "{}: a document of {} tokens, the format's limit is {}", block.path, length, INT32_MAX);
      out.lengths.push_back(static_cast<int32_t>(length));
      out.bytes += static_cast<int64_t>(document.text.size());
    });
    return out;
  }

  void hand_in(int64_t number, EncodedBlock encoded) {
    const std::lock_guard lock(mutex_);
    finished_.emplace(number, std::move(encoded));
    while (!failure_ && finished_.contains(blocks_written_)) {
      const EncodedBlock block = std::move(finished_.extract(blocks_written_).mapped());
      for (const BadInput& fault : block.faults) count_fault(block.path, fault);
      writer_.append(block.ids, block.lengths);
      bytes_in_flight_ -= block.block_bytes;
      result_.bytes += block.bytes;
      ++blocks_written_;  // not where this block ended the run
    }
    MARROW_CHECK(!options_.stop || !options_.stop(), ExitCode::kDeviceFault, Fix("run the command again"),
                 "interrupted by a signal after {} documents; nothing was written under {}", writer_.documents(),
                 options_.output);
    room_.notify_all();
    show_progress();
  }

  void count_fault(const std::string& path, const BadInput& fault) {
    MARROW_CHECK(options_.skip_faults, ExitCode::kBadInput,
                 Fix("repair this input, or add --on-error skip to leave such documents out"), "{}:{}: {}: {}", path,
                 fault.line, fault.fault, fault.detail);
    ++result_.faults[fault.fault];
    if (++result_.skipped > kWarnings) return;
    const char* const last = result_.skipped < kWarnings ? "" : " (further ones are only counted)";
    logger_.warn(fmt::format("{}:{}: skipped, {}: {}{}", path, fault.line, fault.fault, fault.detail, last));
  }

  void show_progress() {
    const double now = seconds();
    if (now < next_progress_) return;
    next_progress_ = now + options_.progress_seconds;
    const auto total = static_cast<double>(std::max<int64_t>(source_.disk_bytes(), 1));
    const double share = std::min(1.0, static_cast<double>(disk_bytes_read_) / total);
    const double megabytes = static_cast<double>(result_.bytes) / 1e6;
    logger_.progress(fmt::format("tokenize {:5.1f}%  {} documents  {:.1f} MB  {:.1f} MB/s  {:.0f} s left", 100 * share,
                                 writer_.documents(), megabytes, megabytes / now,
                                 now * (1 - share) / std::max(share, 1e-3)));
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  const TokenizeOptions& options_;
  const Tokenizer& tokenizer_;
  Logger& logger_;
  const Clock::time_point start_ = Clock::now();

  std::mutex source_mutex_;  // held while reading; taken before mutex_
  DocumentSource source_;

  std::mutex mutex_;  // guards all below
  std::condition_variable room_;
  CorpusWriter writer_;
  TokenizeResult result_;
  std::map<int64_t, EncodedBlock> finished_;
  int64_t blocks_taken_ = 0, blocks_written_ = 0, bytes_in_flight_ = 0, disk_bytes_read_ = 0;
  double next_progress_ = 0.5;  // seconds since the start
  std::exception_ptr failure_;
};

}  // namespace

TokenizeResult tokenize_corpus(const TokenizeOptions& options, const Tokenizer& tokenizer, Logger& logger) {
  MARROW_CHECK(!options.append_end_of_document || tokenizer.end_of_document(), ExitCode::kUsage,
               Fix("name it by --eod-id ID, or leave it out by --no-eod"), "tokenizer {} has no end-of-document token",
               tokenizer.name());
  return Pipeline(options, tokenizer, logger).run();
}

}  // namespace marrow
