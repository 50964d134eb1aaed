#include "parallel/transfer_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "ops/pch.h"
#include "parallel/bootstrap.h"

namespace marrow {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kSlots = 32;
constexpr auto kTick = std::chrono::milliseconds(250);
constexpr double kTimeOfMpirun = 1;  // seconds in which mpirun, which knows the signal, ends all after a death

template <size_t size>
void copy_text(char (&into)[size], std::string_view text) {
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(into, text.data(), length);
  into[length] = '\0';
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Process numbers mean the same where this text is the same: the host's name and the process namespace.
std::string host_identity() {
  std::array<char, 64> host{};
  gethostname(host.data(), host.size() - 1);
  struct stat space {};
  stat("/proc/self/ns/pid", &space);
  return fmt::format("{}/{}", host.data(), space.st_ino);
}

std::string first_error_path(const std::string& ranks_folder) { return ranks_folder + "/first-error"; }

}  // namespace

char process_state(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = text.rfind(')');  // the name may hold spaces and brackets
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return 'X';
  return text[name_end + 2] == 'Z' ? 'X' : text[name_end + 2];
}

void OperationSlot::begin(std::string_view name, int64_t size) {
  copy_text(operation, name);
  bytes.store(size, std::memory_order_relaxed);
  since_ns.store(now_ns(), std::memory_order_relaxed);
  started.fetch_add(1, std::memory_order_release);
}

struct RunRecords::RankFile {
  int64_t pid = 0;
  char host[96] = {};
  char who[96] = {};
  std::atomic<int64_t> step = 0;
  std::atomic<bool> left = false;  // ended its part of the run
  std::atomic<size_t> slots = 0;
  OperationSlot slot[kSlots];
};

const RunRecords::RankFile& RunRecords::file(const MappedFile& mapped) const {
  return *reinterpret_cast<const RankFile*>(mapped.unchecked_bytes().data());
}

void RunRecords::map_mine(const std::string& who) {
  const std::string name = path(bootstrap_->rank());
  const int descriptor = ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  const bool sized = descriptor >= 0 && posix_fallocate(descriptor, 0, sizeof(RankFile)) == 0;
  void* memory =
      sized ? mmap(nullptr, sizeof(RankFile), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0) : MAP_FAILED;
  const int error = errno;
  if (descriptor >= 0) close(descriptor);
  MARROW_CHECK(memory != MAP_FAILED, ExitCode::kDeviceFault,
               Fix("set log.dir to a folder that every rank can write, with space left"), "cannot make {}: {}", name,
               std::strerror(error));
  mine_.reset(std::construct_at(static_cast<RankFile*>(memory)),
              [](RankFile* file) { munmap(file, sizeof(RankFile)); });
  mine_->pid = getpid();
  copy_text(mine_->host, host_);
  copy_text(mine_->who, who);
}

void RunRecords::open(const std::string& folder, Bootstrap& bootstrap, const std::string& who, double timeout_seconds) {
  folder_ = folder + "/ranks";
  host_ = host_identity();
  bootstrap_ = &bootstrap;
  timeout_ = timeout_seconds;
  run_together(bootstrap, [&] {
    if (bootstrap.rank() != 0) return;
    std::filesystem::remove_all(folder_);  // of an earlier run
    std::filesystem::create_directories(folder_);
  });
  run_together(bootstrap, [&] { map_mine(who); });
  run_together(bootstrap, [&] {
    for (int64_t rank = 0; rank < bootstrap.size(); ++rank) files_.emplace_back(path(rank), ExitCode::kDeviceFault);
  });
  bootstrap.record_in(add("bootstrap"));
  thread_ = std::thread([this] { watch(); });
}

RunRecords::~RunRecords() {
  if (!thread_.joinable()) return;
  bootstrap_->record_in(nullptr);
  mine_->left = true;
  {
    const std::lock_guard guard(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

OperationSlot* RunRecords::add(std::string_view group) {
  const size_t index = mine_->slots;
  MARROW_CHECK(index < kSlots, ExitCode::kDeviceFault, Fix("raise kSlots"), "more than {} communicators", kSlots);
  OperationSlot* slot = &mine_->slot[index];
  copy_text(slot->group, group);
  mine_->slots = index + 1;
  return slot;
}

void RunRecords::set_probe(const OperationSlot* slot, std::function<void()> probe) {
  const std::lock_guard guard(mutex_);
  probes_[slot] = std::move(probe);
}

void RunRecords::set_step(int64_t step) {
  if (mine_ != nullptr) mine_->step = step;
}

void RunRecords::fail(Error error) const {
  if (mine_ == nullptr) throw error;
  end(std::move(error), /*vanished=*/false);
}

std::string RunRecords::table_row(const RankFile& file) const {
  const OperationSlot* last = &file.slot[0];
  for (size_t i = 1; i < file.slots; ++i) {
    const OperationSlot& slot = file.slot[i];
    if (std::pair(slot.waited_for.load(), slot.since_ns.load()) >
        std::pair(last->waited_for.load(), last->since_ns.load())) {
      last = &slot;
    }
  }
  const bool done = last->finished >= last->started;
  std::string state = last->waited_for ? "waits" : done ? "done" : "in flight";
  if (file.host == host_) {
    const char process = process_state(file.pid);
    if (process == 'X') state += file.left ? ", ended" : ", process is dead";
    if (process == 'T' || process == 't') state += ", process is stopped";
  }
  return fmt::format("  {:<40} {:>6}  {:<14} {:<14} {:>7} {:>14} {:>9.1f}  {}\n", file.who, file.step.load(),
                     last->group, last->started == 0 ? "none" : last->operation, last->started.load(),
                     last->bytes.load(),
                     last->started == 0 ? 0.0 : 1e-9 * static_cast<double>(now_ns() - last->since_ns), state);
}

std::string RunRecords::table() const {
  std::string text = fmt::format("  {:<40} {:>6}  {:<14} {:<14} {:>7} {:>14} {:>9}  {}\n", "rank", "step", "group",
                                 "operation", "number", "bytes", "s ago", "state");
  for (const MappedFile& mapped : files_) text += table_row(file(mapped));
  return text;
}

// `vanished`: line 1 says so. Written aside and linked, so that the first of several stands there whole.
void RunRecords::end(Error error, bool vanished) const {
  if (failing_.exchange(true)) {
    while (true) pause();  // another thread of this rank is at it
  }
  error.add_who(mine_->who);
  const std::string text = json_ ? error.to_json() + "\n" : error.to_text();
  const int code = static_cast<int>(error.report().code);
  const std::string own = fmt::format("{}/error-{:04}", folder_, bootstrap_->rank());
  const char* launcher = std::getenv(kLaunchedVariable);
  bool written = false;
  if (std::FILE* file = std::fopen(own.c_str(), "w")) {
    fmt::print(file, "{} {}{}\n{}", code, launcher == nullptr ? "" : launcher, vanished ? " vanished" : "", text);
    written = std::fclose(file) == 0;
  }
  const bool first = !written || link(own.c_str(), first_error_path(folder_).c_str()) == 0 || errno != EEXIST;
  if (!first) follow_first_error();
  if (!written || launcher == nullptr) {
    std::fflush(nullptr);
    std::fputs(text.c_str(), stderr);
  }
  std::fflush(nullptr);
  _exit(code);  // no destructors: they would wait for other ranks
}

void RunRecords::follow_first_error() const {
  std::fflush(nullptr);
  const int code = read_first_error(std::filesystem::path(folder_).parent_path().string()).code;
  _exit(code != 0 ? code : static_cast<int>(ExitCode::kDeviceFault));
}

void RunRecords::watch() {
  std::vector<Watched> watched(kSlots);
  Clock::time_point last = Clock::now();
  double dead_seconds = 0;
  std::unique_lock guard(mutex_);
  while (!wake_.wait_for(guard, kTick, [&] { return stop_; })) {
    const Clock::time_point now = Clock::now();
    // This process too may have been stopped for a while: that is no time in which others were slow.
    const double seconds = std::min(std::chrono::duration<double>(now - last).count(), 1.0);
    last = now;
    if (failing_) return;
    if (access(first_error_path(folder_).c_str(), F_OK) == 0) {
      if (!failing_.exchange(true)) follow_first_error();
      return;
    }
    try {
      for (const auto& [slot, probe] : probes_) {
        if (probe) probe();
      }
    } catch (Error& error) {
      fail(std::move(error));
    } catch (const std::exception& error) {
      fail(Error(ExitCode::kDeviceFault, error.what(), Fix("run marrow doctor"), __FILE__, __LINE__));
    }
    const RankFile* dead = find_dead();
    dead_seconds = dead == nullptr ? 0 : dead_seconds + seconds;
    if (dead_seconds >= kTimeOfMpirun) fail_for_dead(*dead);
    find_stuck(watched, seconds);
  }
}

void RunRecords::find_stuck(std::vector<Watched>& watched, double seconds) const {
  for (size_t i = 0; i < mine_->slots; ++i) {
    const OperationSlot& slot = mine_->slot[i];
    const int64_t finished = slot.finished;
    const bool stuck = slot.waited_for && finished == watched[i].finished;
    watched[i] = {finished, stuck ? watched[i].seconds + seconds : 0.0};
    if (watched[i].seconds < timeout_) continue;
    fail(Error(ExitCode::kDeviceFault,
               fmt::format("{} {} of group {} has not ended within log.watchdog_seconds = {}\n{}", slot.operation,
                           slot.started.load(), slot.group, timeout_, table()),
               Fix("look at the ranks that are stopped, dead or behind in number: the others wait for them; raise "
                   "log.watchdog_seconds if they are only slow"),
               __FILE__, __LINE__));
  }
}

const RunRecords::RankFile* RunRecords::find_dead() const {
  for (const MappedFile& mapped : files_) {
    const RankFile& peer = file(mapped);
    if (!peer.left && peer.host == host_ && process_state(peer.pid) == 'X' && !peer.left) return &peer;
  }
  return nullptr;
}

void RunRecords::fail_for_dead(const RankFile& peer) const {
  end(Error(ExitCode::kDeviceFault,
            fmt::format("{} (process {}) is dead, without an error of its own\n{}", peer.who, peer.pid, table()),
            Fix("see dmesg: the kernel kills processes when memory runs out, and logs crashes; a crash is a "
                "defect of marrow"),
            __FILE__, __LINE__),
      /*vanished=*/true);
}

FirstError read_first_error(const std::string& run_folder, std::string_view launcher) {
  const std::string path = first_error_path(run_folder + "/ranks");
  if (!std::filesystem::exists(path)) return {};
  const std::string text = read_text_file(path);
  const std::string line = text.substr(0, text.find('\n'));
  if (line.find(launcher) == std::string::npos) return {};
  return {std::atoi(line.c_str()), line.ends_with("vanished"), text.substr(line.size() + 1)};
}

}  // namespace marrow
