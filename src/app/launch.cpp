#include "app/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "ops/pch.h"
#include "parallel/transfer_record.h"

namespace marrow {
namespace {

constexpr double kLeastStart = 20;                // seconds: the programs load, on busy cores
constexpr std::chrono::seconds kStopInStart{10};  // for a start to end by itself once a stop is asked for

std::vector<std::string> mpirun_command(int64_t processes) {
  std::vector<std::string> words = {"mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"};
  // One machine: no other transport, no remote shell. Before it kills, mpirun sleeps for the whole
  // timeout, even if all ranks are dead: a second is enough, because the ranks end themselves when one
  // has failed, and it sees no signal that asks for a save.
  for (const char* pair : {"pml ob1", "btl self,vader", "plm isolated", "odls_base_sigkill_timeout 1",
                           "orte_base_help_aggregate 0", "btl_vader_single_copy_mechanism none"}) {
    const std::string text = pair;
    const size_t space = text.find(' ');
    words.insert(words.end(), {"--mca", text.substr(0, space), text.substr(space + 1)});
  }
  words.insert(words.end(), {"--host", fmt::format("localhost:{}", processes), "-n", std::to_string(processes)});
  // This process's own command line, the program by its real path.
  const size_t program = words.size();
  std::ifstream own("/proc/self/cmdline");
  for (std::string word; std::getline(own, word, '\0');) words.push_back(word);
  words.at(program) = std::filesystem::read_symlink("/proc/self/exe").string();
  return words;
}

// Starts `words` with standard error into `pipe_end`. It dies with this process.
pid_t start_child(const std::vector<std::string>& words, const std::string& launcher, int pipe_end) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  setenv(kLaunchedVariable, launcher.c_str(), 1);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child != 0) return child;
  setpgid(0, 0);  // Ctrl-C of the terminal comes through the parent alone
  // A second after a SIGINT or SIGTERM mpirun would kill the ranks, in the middle of a save: as StopSignal has blocked
  // them, it does not see them, whoever sends them. It starts the ranks with no signal blocked. SIGHUP still ends it,
  // whoever sends it, and here its parent's death does:
  prctl(PR_SET_PDEATHSIG, SIGHUP);
  if (getppid() != parent) _exit(127);
  sigset_t hangup;
  sigemptyset(&hangup);
  sigaddset(&hangup, SIGHUP);
  sigprocmask(SIG_UNBLOCK, &hangup, nullptr);
  dup2(pipe_end, STDERR_FILENO);
  if (const int null = open("/dev/null", O_RDONLY); null >= 0) dup2(null, STDIN_FILENO);
  execvp(arguments[0], arguments.data());
  fmt::print(stderr, "cannot start {}: {}\n", arguments[0], std::strerror(errno));
  _exit(127);
}

std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  std::error_code gone;
  for (const auto& thread : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", parent), gone)) {
    std::ifstream file(thread.path() / "children");
    for (pid_t child = 0; file >> child;) children.push_back(child);
  }
  return children;
}

// A StopSignal blocks the signal: until it does, the signal would just end the process.
bool waits_for_stop(pid_t process) {
  std::ifstream file(fmt::format("/proc/{}/status", process));
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("SigBlk:")) return (std::stoull(line.substr(7), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
  }
  return false;
}

// Standard error of the ranks, line by line, without mpirun's own words between two rules of dashes.
class ErrorFilter {
 public:
  void take(std::string_view bytes) {
    pending_ += bytes;
    for (size_t end = 0; (end = pending_.find('\n')) != std::string::npos; pending_.erase(0, end + 1)) {
      line(pending_.substr(0, end + 1));
    }
  }
  void finish() {
    if (!pending_.empty()) line(std::exchange(pending_, "") + "\n");
  }
  const std::string& kept_back() const { return kept_back_; }
  int64_t started() const { return started_; }  // ranks that have come through MPI_Init

 private:
  void line(std::string text) {
    if (text.ends_with(kStartedLine)) {  // after what a library wrote without an end of line, perhaps
      ++started_;
      text.resize(text.size() - std::string_view(kStartedLine).size());
      if (text.empty()) return;
    }
    const bool rule = text.size() > 60 && text.find_first_not_of("-\n") == std::string::npos;
    if (rule) inside_ = !inside_;
    const bool from_mpirun = rule || inside_ || text.find("] PMIX ERROR:") != std::string::npos ||
                             text.find("] ORTE_ERROR_LOG:") != std::string::npos;
    if (from_mpirun) {
      kept_back_ += text;
    } else {
      std::fputs(text.c_str(), stderr);
    }
  }
  bool inside_ = false;
  int64_t started_ = 0;
  std::string pending_, kept_back_;
};

// "process rank 3 with PID": what mpirun says of a rank that a signal ended; -1 where it does not.
int64_t rank_in(const std::string& text) {
  constexpr std::string_view kPhrase = "process rank ";
  const size_t at = text.find(kPhrase);
  return at == std::string::npos ? -1 : std::atoll(text.c_str() + at + kPhrase.size());
}

// Ends the ranks, and by that mpirun. "; rank 3 … is stopped": those for which the others wait in MPI_Init.
std::string end_ranks(pid_t mpirun, const std::function<std::string(int64_t)>& rank_text) {
  std::string stopped;
  for (const pid_t rank : children_of(mpirun)) {
    constexpr std::string_view kRank = "OMPI_COMM_WORLD_RANK=";
    std::ifstream file(fmt::format("/proc/{}/environ", rank));
    for (std::string variable; process_state(rank) == 'T' && std::getline(file, variable, '\0');) {
      if (!variable.starts_with(kRank)) continue;
      stopped += fmt::format("; {} is stopped", rank_text(std::stoll(variable.substr(kRank.size()))));
    }
    kill(rank, SIGKILL);
  }
  kill(mpirun, SIGHUP);  // it may have none yet
  return stopped;
}

// Until `child` has ended; returns its status, of waitpid. Calls `watch` all the time.
int supervise(pid_t child, int descriptor, StopSignal& stop, ErrorFilter& filter, const std::function<void()>& watch) {
  int status = 0;
  std::set<pid_t> told;
  for (bool running = true; running;) {
    pollfd ready{descriptor, POLLIN, 0};
    poll(&ready, 1, 100);
    running = waitpid(child, &status, WNOHANG) == 0;
    std::array<char, 65536> bytes;
    for (ssize_t got = 0; (got = read(descriptor, bytes.data(), bytes.size())) > 0;) {
      filter.take({bytes.data(), static_cast<size_t>(got)});
    }
    if (running) watch();
    if (!running || !stop.requested()) continue;
    for (const pid_t rank : children_of(child)) {
      if (!told.contains(rank) && waits_for_stop(rank) && kill(rank, SIGTERM) == 0) told.insert(rank);
    }
  }
  filter.finish();
  return status;
}

}  // namespace

bool launched() { return std::getenv(kLaunchedVariable) != nullptr; }

int launch_ranks(int64_t processes, const std::string& run_folder, double start_seconds, StopSignal& stop,
                 const std::function<std::string(int64_t)>& rank_text) {
  const std::string launcher = fmt::format("{}-{:x}", getpid(), std::random_device()());
  std::array<int, 2> ends{};
  MARROW_CHECK(pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) == 0, ExitCode::kDeviceFault,
               Fix("raise the limit of open files"), "no pipe: {}", std::strerror(errno));
  fcntl(ends[1], F_SETFL, 0);  // the ranks' end blocks
  const pid_t child = start_child(mpirun_command(processes), launcher, ends[1]);
  close(ends[1]);
  ErrorFilter filter;
  const std::chrono::duration<double> limit(std::max(start_seconds, kLeastStart));
  const auto begin = std::chrono::steady_clock::now();
  std::optional<std::string> late;                             // the start took too long
  std::optional<std::chrono::steady_clock::time_point> asked;  // to stop
  const int status = supervise(child, ends[0], stop, filter, [&] {
    const auto now = std::chrono::steady_clock::now();
    if (stop.requested() && !asked) asked = now;
    if (late || filter.started() == processes) return;
    // Who has started waits for the others in MPI_Init, where nobody asks for a stop.
    if (now - begin > limit || (asked && now - *asked > kStopInStart)) late = end_ranks(child, rank_text);
  });
  close(ends[0]);
  MARROW_CHECK(!late, ExitCode::kDeviceFault,
               Fix("see what stops or holds up these processes; raise log.watchdog_seconds where they are only slow"),
               "{} of {} ranks have started within {:.0f} s{}", filter.started(), processes,
               std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), *late);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (code == 0) return 0;
  const FirstError first = read_first_error(run_folder, launcher);  // not that of another run
  if (first.code != 0 && !(first.vanished && code > 128)) {
    std::fputs(first.text.c_str(), stderr);
    return first.code;
  }
  if (code > 128) {
    const int64_t rank = rank_in(filter.kept_back());
    MARROW_THROW(ExitCode::kDeviceFault,
                 Fix("the kernel kills (signal 9) when memory runs out: dmesg tells; a crash is a defect of marrow"),
                 "{} was ended by signal {} ({})", rank < 0 ? "a rank" : rank_text(rank), code - 128,
                 strsignal(code - 128));
  }
  if (code >= 2 && code <= 5) return code;  // a rank told its error
  std::fputs(filter.kept_back().c_str(), stderr);
  MARROW_THROW(ExitCode::kDeviceFault,
               Fix("{}", code == 127 ? "install Open MPI: ./dev setup"
                                     : "see what mpirun said above; started again, the run goes on from its last save"),
               "mpirun ended with exit code {}", code);
}

}  // namespace marrow
