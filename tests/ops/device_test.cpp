#include "ops/device.h"

#include <thread>

#include "ops/op_test_support.h"

namespace marrow {
namespace {

using namespace std::chrono_literals;

TEST(DeviceMark, TimesTheQueuesWorkAndNotTheHostThatReadsItLater) {
  for (const at::Device device : test_devices()) {
    SCOPED_TRACE(device.str());
    const at::Tensor square = random_tensor({2048, 2048}, at::kFloat, device, 1);
    at::Tensor product = square.mm(square);
    const auto begin = std::chrono::steady_clock::now();
    const DeviceMark before(device);
    for (int i = 0; i < 4; ++i) product = square.mm(product);
    const DeviceMark after(device), at_once(device);
    std::this_thread::sleep_for(200ms);
    at_once.wait();
    const double work = after.seconds_since(before);
    const std::chrono::duration<double> all = std::chrono::steady_clock::now() - begin;
    EXPECT_GT(work, 1e-4);  // 69 GFLOP
    EXPECT_LT(work, all.count() - 0.19);
    EXPECT_GE(at_once.seconds_since(after), 0.0);
    EXPECT_LT(at_once.seconds_since(after), 0.1);
    EXPECT_NEAR(at_once.seconds_since(before), work + at_once.seconds_since(after), 1e-4);
  }
}

TEST(DeferredValues, AreWhatTheTensorHeldWhenTheyWereAskedFor) {
  for (const at::Device device : test_devices()) {
    SCOPED_TRACE(device.str());
    const at::Tensor source = at::tensor({1.5, -2.25, 1e300, 0.1}, at::kDouble).to(device);
    DeferredValues deferred(source);
    DeferredValues narrowed(source.slice(0, 1, 2).to(at::kFloat));
    source.zero_();
    EXPECT_EQ(deferred.values(), (std::vector<double>{1.5, -2.25, 1e300, 0.1}));
    EXPECT_EQ(narrowed.values(), std::vector<double>{-2.25});
  }
}

}  // namespace
}  // namespace marrow
