#include "ops/pch.h"

#include "train/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

namespace marrow {
namespace {

TEST(Tensorboard, Crc32cKnownValues) {  // RFC 3720, B.4
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
}

// The tensorboard package reads the events, checks each frame's checksum, and forgets the steps
// that a resumed run writes anew. The oracle script knows the numbers written here.
TEST(Tensorboard, ThePackageReadsOurEvents) {
  const std::string dir = (std::filesystem::temp_directory_path() / fmt::format("marrow-events-{}", getpid())).string();
  std::filesystem::remove_all(dir);
  {
    TensorboardWriter writer(dir, 0);
    for (int64_t step = 1; step <= 300; ++step) {
      writer.write(step, {{"train/loss", 10.0 / static_cast<double>(step)}, {"train/lr", 1e-3}});
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  {
    TensorboardWriter resumed(dir, 200);
    for (int64_t step = 201; step <= 250; ++step) {
      resumed.write(step, {{"train/loss", -static_cast<double>(step)}});
    }
  }
  const std::string command =
      fmt::format("{0}/.venv/bin/python {0}/tests/oracle/tensorboard_oracle.py {1}", MARROW_SOURCE_DIR, dir);
  EXPECT_EQ(std::system(command.c_str()), 0);
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace marrow
