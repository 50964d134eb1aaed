// test_kernels: the tests of tests/ops on the emulated device alone (emulator.h).
#include "emulator/emulator.h"
#include "ops/op_test_support.h"

// Fibres are no overflow of the program's stack, and ATen's memory is never given back.
extern "C" const char* __asan_default_options() {
  return "detect_leaks=0:detect_stack_use_after_return=0:alloc_dealloc_mismatch=0:malloc_context_size=0:quarantine_"
         "size_mb=64";
}

namespace marrow {
namespace {

class Orders : public ::testing::EmptyTestEventListener {
  void OnTestIterationStart(const ::testing::UnitTest&, int iteration) override { emulator::first_order = iteration; }
};

class EveryKernel : public ::testing::Environment {
  void TearDown() override {
    const std::vector<std::string> missing = emulator::kernels_not_launched();
    EXPECT_TRUE(missing.empty()) << "not launched twice by any test: " << c10::Join(", ", missing)
                                 << "; add one to tests/ops";
  }
};

}  // namespace
}  // namespace marrow

int main(int count, char** arguments) {
  marrow::tests_run_on_cpu = false;
  MARROW_CHECK(marrow::test_devices().size() == 1, marrow::ExitCode::kDeviceFault,
               marrow::Fix("see tests/emulator/device.cpp"), "there are {} devices", marrow::test_devices().size());
  ::testing::InitGoogleTest(&count, arguments);
  std::string& filter = ::testing::GTEST_FLAG(filter);
  if (filter == "*") ::testing::AddGlobalTestEnvironment(new marrow::EveryKernel);  // gtest's own
  // Attention's kernels are cuDNN's, and this device has no queue of which marks could be made.
  filter += (filter.find('-') == std::string::npos ? "-" : ":") +
            std::string("Attention.*:DeviceMark.*:DeferredValues.*:Slow*");
  ::testing::UnitTest::GetInstance()->listeners().Append(new marrow::Orders);
  return RUN_ALL_TESTS();
}
