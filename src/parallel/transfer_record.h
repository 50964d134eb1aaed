// What each rank is doing, where all ranks can read it: who is stuck, who is dead, who failed first.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/files.h"

namespace marrow {

class Bootstrap;

// The operations of one communicator on one rank. Lies in a memory-mapped file: no pointers.
struct OperationSlot {
  char group[24] = {};
  char operation[24] = {};              // the last one begun
  std::atomic<int64_t> bytes = 0;       // of it
  std::atomic<int64_t> started = 0;     // how many were begun: the sequence number
  std::atomic<int64_t> finished = 0;    // and are over
  std::atomic<int64_t> since_ns = 0;    // of the system clock: when the last one began
  std::atomic<bool> waited_for{false};  // the rank does nothing else than wait for one

  void begin(std::string_view operation, int64_t bytes);
  void end() { finished.fetch_add(1, std::memory_order_relaxed); }
};

// One rank's file in RUN/ranks/, and the thread that watches it. Until open(), and in a run of one process,
// it does nothing. The thread looks four times a second:
// - an operation waited for longer than `timeout_seconds`: prints the table of all ranks, fails;
// - another rank failed: this one ends silently with the same exit code;
// - the process of another rank of this host is gone without a word: fails, naming it.
class RunRecords {
 public:
  explicit RunRecords(bool json);  // errors print as JSON
  ~RunRecords();
  RunRecords(const RunRecords&) = delete;
  RunRecords& operator=(const RunRecords&) = delete;

  // Every rank calls it at the same point of the start. `who`: "rank 5 (pp 1, …)". This object lives until the
  // last communication. Error: kUsage where another run uses `folder`.
  void open(const std::string& folder, Bootstrap& bootstrap, const std::string& who, double timeout_seconds);

  // A slot for a communicator (once open); this object outlives it. The watchdog calls its probe, if it has one, each
  // time before it looks: no host sees the operations of a GPU end.
  OperationSlot* add(std::string_view group);
  void set_probe(const OperationSlot* slot, std::function<void()> probe);
  void set_step(int64_t step);
  std::string table() const;

  // Ends this process with the error's code, and by that the run. Of all ranks that fail the first one's
  // error is shown: it stands in RUN/ranks/first-error (line 1: exit code), and on standard error unless
  // marrow --processes started the ranks and shows it at the end. Before open(): throws the error.
  [[noreturn]] void fail(Error error) const;

 private:
  struct RankFile;  // as mapped
  struct State;
  bool json_;
  std::unique_ptr<State> state_;
};

// Of RUN: "ranks/first-error". Its text without the first line, and the exit code; code 0: there is none.
struct FirstError {
  int code = 0;
  bool vanished = false;  // a peer was found dead: who started the ranks may know more
  std::string text;
};
FirstError read_first_error(const std::string& run_folder);

// Set in the environment of ranks by `marrow pretrain --processes`.
inline constexpr const char* kLaunchedVariable = "MARROW_LAUNCHED";

}  // namespace marrow
