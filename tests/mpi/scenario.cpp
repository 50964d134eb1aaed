#include "mpi/scenario.h"

#include <csignal>

#include "app/failure.h"
#include "app/launch.h"
#include "base/stop_signal.h"
#include "ops/pch.h"
#include "parallel/mesh_communicators.h"
#include "parallel/transfer_record.h"

namespace marrow {
namespace {

struct Scenario {
  std::string name, folder;
  int64_t rank = 0;
  double seconds = 0;
};

void misbehave(const std::string& name) {
  if (name == "kill") raise(SIGKILL);
  if (name == "segfault") raise(SIGSEGV);
  if (name == "stop") raise(SIGSTOP);
  MARROW_CHECK(name != "throw", ExitCode::kDiverged, Fix("lower optimizer.lr"), "loss {} must be finite", "nan");
  while (name == "hang") std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

void work(const Scenario& scenario, Bootstrap& bootstrap, RunRecords& records, StopSignal& stop) {
  run_together(bootstrap, [&] {
    MARROW_CHECK(scenario.name != "refuse" || bootstrap.rank() != scenario.rank, ExitCode::kUsage,
                 Fix("set data.train"), "data.train of rank {} does not exist", bootstrap.rank());
  });
  MeshShape shape;
  shape.dp = bootstrap.size();
  const Mesh mesh(shape, bootstrap.rank());
  records.open(scenario.folder, bootstrap, mesh.text(), scenario.seconds);
  CommunicatorOptions options;
  options.records = &records;
  const MeshCommunicators made = make_mesh_communicators(mesh, bootstrap, options);
  const bool endless = scenario.name == "until-signal";
  for (int64_t step = 1; step <= 40 || endless; ++step) {
    records.set_step(step);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (step == 20 && bootstrap.rank() == scenario.rank) misbehave(scenario.name);
    const at::Tensor stops = at::full({1}, stop.requested() ? 1 : 0, at::kLong);
    made.world->all_reduce(stops).wait();
    const at::Tensor values = at::ones({1000 * step % 9000});
    made.dense_shard->all_reduce(values).wait();
    if (stops.item<int64_t>() > 0) break;
  }
  if (bootstrap.rank() == 0) fmt::print("stopped {}\n", stop.requested());
}

}  // namespace

int run_scenario(const std::vector<std::string>& words) {
  const bool json = std::find(words.begin(), words.end(), "--json") != words.end();
  const auto processes = std::find(words.begin(), words.end(), "--processes");
  const Scenario scenario{words.at(0), words.at(1), std::stoll(words.at(2)), std::stod(words.at(3))};
  try {
    StopSignal stop;
    if (processes != words.end() && !launched()) {
      return launch_ranks(std::stoll(processes[1]), scenario.folder, scenario.seconds, stop,
                          [](int64_t rank) { return fmt::format("rank {}", rank); });
    }
    const std::unique_ptr<Bootstrap> bootstrap = make_bootstrap();
    RunRecords records(json);
    try {
      work(scenario, *bootstrap, records, stop);
    } catch (const PeerFailure&) {
      throw;
    } catch (...) {
      records.fail(current_error());
    }
    return 0;
  } catch (const PeerFailure& failure) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return failure.code;
  } catch (...) {
    const Error error = current_error();
    std::fputs(json ? (error.to_json() + "\n").c_str() : error.to_text().c_str(), stderr);
    return static_cast<int>(error.report().code);
  }
}

}  // namespace marrow
