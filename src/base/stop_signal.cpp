#include "base/stop_signal.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include "base/error.h"

namespace marrow {

StopSignal::StopSignal() {
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&signals_, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  descriptor_ = signalfd(-1, &signals_, SFD_NONBLOCK | SFD_CLOEXEC);
  MARROW_CHECK(descriptor_ >= 0, ExitCode::kDeviceFault, Fix("raise the limit of open files"),
               "cannot watch for SIGINT, SIGTERM and SIGHUP");
}

StopSignal::~StopSignal() {
  requested();  // takes what is still waiting, else unblocking would deliver it
  close(descriptor_);
  pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
}

bool StopSignal::requested() {
  signalfd_siginfo info{};
  while (read(descriptor_, &info, sizeof info) == sizeof info) requested_ = true;
  return requested_;
}

}  // namespace marrow
