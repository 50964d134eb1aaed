#include "base/stop_signal.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>

#include "base/error.h"

namespace marrow {
namespace {

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

}  // namespace

StopSignal::StopSignal() {
  const sigset_t set = stop_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  descriptor_ = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
  MARROW_CHECK(descriptor_ >= 0, ExitCode::kDeviceFault, Fix("raise the limit of open files"),
               "cannot watch for SIGINT and SIGTERM");
}

StopSignal::~StopSignal() {
  requested();  // takes what is still waiting, else unblocking would deliver it
  close(descriptor_);
  const sigset_t set = stop_signals();
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

bool StopSignal::requested() {
  signalfd_siginfo info{};
  while (read(descriptor_, &info, sizeof info) == sizeof info) requested_ = true;
  return requested_;
}

}  // namespace marrow
