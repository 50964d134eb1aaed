// What each rank is doing, where all ranks can read it: who is stuck, who is dead, who failed first.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

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
  void begin_wait(std::string_view name, int64_t size) {
    begin(name, size);
    waited_for = true;
  }
  void end_wait() {
    waited_for = false;
    end();
  }
};

// One rank's file in RUN/ranks/, and the thread that watches it. Until open(), and in a run of one process,
// it does nothing. The thread looks four times a second:
// - an operation waited for longer than `timeout_seconds`: prints the table of all ranks, fails;
// - another rank failed: this one ends silently with the same exit code;
// - the process of another rank of this host is gone without a word: fails, naming it.
class RunRecords {
 public:
  explicit RunRecords(bool json) : json_(json) {}  // errors print as JSON
  ~RunRecords();
  RunRecords(const RunRecords&) = delete;
  RunRecords& operator=(const RunRecords&) = delete;

  // Every rank calls it at the same point of the start. `who`: "rank 5 (pp 1, …)". This object lives until the
  // last communication. No other run uses `folder`: who calls this holds its lock.
  void open(const std::string& folder, Bootstrap& bootstrap, const std::string& who, double timeout_seconds);

  // A slot for a communicator (once open); this object outlives it. The watchdog calls its probe, if it has one, each
  // time before it looks: no host sees the operations of a GPU end.
  OperationSlot* add(std::string_view group);
  void set_probe(const OperationSlot* slot, std::function<void()> probe);
  void set_step(int64_t step);
  std::string table() const;

  // Ends this process with the error's code, and by that the run. Of all ranks that fail the first one's
  // error is shown: it stands in RUN/ranks/first-error (line 1: exit code, launcher), and on standard error unless
  // marrow --processes started the ranks and shows it at the end. Before open(): throws the error.
  [[noreturn]] void fail(Error error) const;

 private:
  struct RankFile;  // as mapped
  struct Watched {  // of a slot: what was seen last, and for how long
    int64_t finished = 0;
    double seconds = 0;
  };
  std::string path(int64_t rank) const { return fmt::format("{}/rank-{:04}", folder_, rank); }
  void map_mine(const std::string& who);
  const RankFile& file(const MappedFile& mapped) const;
  std::string table_row(const RankFile& file) const;
  [[noreturn]] void end(Error error, bool vanished) const;
  [[noreturn]] void follow_first_error() const;
  void watch();
  void find_stuck(std::vector<Watched>& watched, double seconds) const;
  const RankFile* find_dead() const;  // a rank of this host, without a word; or none
  [[noreturn]] void fail_for_dead(const RankFile& peer) const;

  bool json_;
  double timeout_ = 0;
  std::string folder_;  // RUN/ranks
  std::string host_;    // of this process
  Bootstrap* bootstrap_ = nullptr;
  std::shared_ptr<RankFile> mine_;  // shared with the file; null until open()
  std::vector<MappedFile> files_;   // of all ranks
  std::mutex mutex_;                // guards the rest
  std::condition_variable wake_;
  bool stop_ = false;
  std::map<const OperationSlot*, std::function<void()>> probes_;
  mutable std::atomic<bool> failing_ = false;
  std::thread thread_;
};

// Of RUN: "ranks/first-error". Its text without the first line, and the exit code; code 0: there is none.
struct FirstError {
  int code = 0;
  bool vanished = false;  // a peer was found dead: who started the ranks may know more
  std::string text;
};
// Of ranks that `launcher` started; "": whoever did.
FirstError read_first_error(const std::string& run_folder, std::string_view launcher = "");

// Set in the environment of ranks by `marrow pretrain --processes`, to a text that no other launch has.
inline constexpr const char* kLaunchedVariable = "MARROW_LAUNCHED";
// What such a rank tells the launcher on standard error once it has come through MPI_Init.
inline constexpr const char* kStartedLine = "marrow: this rank has started\n";

// 'R', 'S', 'T' (stopped) …; 'X' where it is gone, also where only its exit status is left.
char process_state(int64_t pid);

}  // namespace marrow
