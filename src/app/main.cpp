// The binary `marrow`: which subcommand runs, and how a failure of any kind leaves the process.
#include <fmt/ranges.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <thread>

#include "app/command_line.h"
#include "app/failure.h"
#include "parallel/bootstrap.h"

namespace marrow {

// One file of src/app each.
Subcommand tokenize_command(), pretrain_command(), eval_command(), generate_command(), export_command(),
    import_command(), inspect_command(), report_command(), plan_command(), estimate_command(), doctor_command();

namespace {

// OpenMP threads that spin while they wait cost a factor of ten where cores are busy. The runtime
// reads its environment when the program loads, before main, and libc forgets a setenv made that
// early: so the program starts itself anew with the two variables. What the user has set wins.
__attribute__((no_sanitize("address", "undefined"))) void wait_passively(int, char** argv, char** environment) {
  constexpr size_t kMaxVariables = 8192;
  static const char* extended[kMaxVariables + 3];
  static char program[4096];
  size_t count = 0;
  for (; environment[count] != nullptr; ++count) {
    if (count == kMaxVariables) return;
    if (__builtin_strncmp(environment[count], "OMP_WAIT_POLICY=", 16) == 0) return;
    if (__builtin_strncmp(environment[count], "GOMP_SPINCOUNT=", 15) == 0) return;
    extended[count] = environment[count];
  }
  extended[count] = "OMP_WAIT_POLICY=passive";
  extended[count + 1] = "GOMP_SPINCOUNT=0";
  // The file's real name, so that the process is listed as "marrow".
  if (readlink("/proc/self/exe", program, sizeof program - 1) <= 0) return;
  execve(program, argv, const_cast<char**>(extended));  // where it fails, run on as we are
}
__attribute__((section(".preinit_array"), used)) void (*const kBeforeLibraries)(int, char**, char**) = wait_passively;

std::string overview(const std::vector<Subcommand>& commands) {
  std::string out = "marrow: pretraining of mixture-of-experts language models\n\n";
  for (const Subcommand& command : commands) {
    out += fmt::format("  marrow {:<9}  {}\n", command.name, command.summary);
  }
  return out +
         "\nmarrow NAME --help prints options and an example; --json works everywhere.\n"
         "exit codes: 0 done, 2 usage, config or path, 3 damaged input, 4 device or disk, 5 diverged\n";
}

int dispatch(const std::vector<std::string>& words) {
  const std::vector<Subcommand> commands = {
      tokenize_command(), pretrain_command(), eval_command(), generate_command(), export_command(), import_command(),
      inspect_command(),  report_command(),   plan_command(), estimate_command(), doctor_command()};
  if (words.empty()) {
    std::fputs(overview(commands).c_str(), stderr);
    return static_cast<int>(ExitCode::kUsage);
  }
  const std::string& name = words.front();
  if (name == "--help" || name == "-h" || name == "help") {
    std::fputs(overview(commands).c_str(), stdout);
    return 0;
  }
  std::vector<std::string> names;
  for (const Subcommand& command : commands) {
    names.push_back(command.name);
    if (command.name != name) continue;
    const CommandLine args(command, {words.begin() + 1, words.end()});
    if (args.has("help")) {
      std::fputs(help_text(command).c_str(), stdout);
      return 0;
    }
    return command.run(args);
  }
  const std::string nearest = nearest_match(name, names);
  MARROW_THROW(ExitCode::kUsage, Fix(nearest.empty() ? "see marrow --help" : "did you mean marrow " + nearest + "?"),
               "{} is not a subcommand; there are {}", json_quote(name), fmt::join(names, ", "));
}

}  // namespace
}  // namespace marrow

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const bool json = std::find(words.begin(), words.end(), "--json") != words.end();
  rlimit files{};  // a run maps a file a corpus, a shard of weights and a rank
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
  std::signal(SIGXFSZ, SIG_IGN);  // past `ulimit -f` a write fails with an error that we report
  try {
    return marrow::dispatch(words);
  } catch (const marrow::PeerFailure& failure) {
    // The launcher ends all ranks when the first one ends: the failing one has its error to tell.
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return failure.code;
  } catch (...) {
    const marrow::Error error = marrow::current_error();
    std::fputs(json ? (error.to_json() + "\n").c_str() : error.to_text().c_str(), stderr);
    return static_cast<int>(error.report().code);
  }
}
