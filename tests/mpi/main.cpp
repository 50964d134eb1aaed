// test_mpi: every rank runs every test; rank 0 prints, another rank prints its failures. The exit code is
// that of all ranks. `test_mpi --scenario NAME …` is a small run that fails in a chosen way: see scenario.h.
#include "ops/pch.h"
// After the precompiled header:
#include <gtest/gtest.h>

#include <filesystem>

#include "mpi/mpi_test_support.h"
#include "mpi/scenario.h"

namespace marrow {
namespace {

struct World {
  std::unique_ptr<Bootstrap> bootstrap = make_bootstrap();
  std::string folder = "/tmp/marrow-test-mpi-" + bootstrap->broadcast(std::to_string(getpid()), 0);
  RunRecords records{/*json=*/false};
};

std::optional<World>& world() {
  static std::optional<World> made;
  return made;
}

class FailuresOnly : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    fmt::print("rank {}: {}:{}: Failure\n{}\n", test_bootstrap().rank(),
               result.file_name() != nullptr ? result.file_name() : "?", result.line_number(), result.message());
  }
};

int run_tests() {
  world().emplace();
  world()->records.open(world()->folder, test_bootstrap(), fmt::format("rank {}", test_bootstrap().rank()), 60.0);
  if (test_bootstrap().size() == 1) {
    fmt::print("test_mpi needs several ranks: mpirun -n 2 test_mpi\n");
    return 2;
  }
  if (test_bootstrap().rank() != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(std::make_unique<FailuresOnly>().release());  // gtest owns it
  }
  int failed = RUN_ALL_TESTS();
  for (const std::string& other : test_bootstrap().all_gather(std::to_string(failed))) failed |= std::stoi(other);
  const std::string folder = world()->folder;
  const bool first = test_bootstrap().rank() == 0;
  world().reset();  // MPI_Finalize waits for all
  if (first) std::filesystem::remove_all(folder);
  return failed;
}

}  // namespace

Bootstrap& test_bootstrap() { return *world()->bootstrap; }
const std::string& test_folder() { return world()->folder; }

}  // namespace marrow

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "--scenario") return marrow::run_scenario({argv + 2, argv + argc});
  testing::InitGoogleTest(&argc, argv);
  if (testing::GTEST_FLAG(filter) == "*") testing::GTEST_FLAG(filter) = "-*Large*";  // a CTest of its own
  at::set_num_threads(1);
  return marrow::run_tests();
}
