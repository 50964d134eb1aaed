// What the watchdog sees and says, in one process; tests/oracle/launch_oracle.py has several.
#include "ops/pch.h"
// After the precompiled header:
#include <gtest/gtest.h>

#include <filesystem>

#include "parallel/bootstrap.h"
#include "parallel/transfer_record.h"

namespace marrow {
namespace {

class RecordTest : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string folder_ = testing::TempDir() + fmt::format("marrow-records-{}", getpid());
  Bootstrap alone_;
};

TEST_F(RecordTest, TheTableShowsTheLastOperation) {
  RunRecords records(/*json=*/false);
  records.open(folder_, alone_, "rank 0 (pp 0, dp 0, cp 0, ep 0)", 60);
  OperationSlot* world = records.add("world");
  OperationSlot* expert = records.add("expert");
  world->begin("all_reduce", 4);
  world->end();
  records.set_step(17);
  for (int i = 0; i < 3; ++i) expert->begin("all_to_all", 4096);
  const std::string table = records.table();
  EXPECT_NE(table.find("rank 0 (pp 0, dp 0, cp 0, ep 0)"), std::string::npos) << table;
  EXPECT_NE(table.find(" 17  expert         all_to_all           3           4096"), std::string::npos) << table;
  EXPECT_NE(table.find("in flight"), std::string::npos) << table;
  for (int i = 0; i < 3; ++i) expert->end();
  EXPECT_NE(records.table().find("done"), std::string::npos);
}

TEST_F(RecordTest, AnOperationThatDoesNotEndEndsTheRun) {
  const auto hang = [this](bool progress) {
    RunRecords records(/*json=*/false);
    records.open(folder_, alone_, "rank 0", 0.6);
    OperationSlot* slot = records.add("context");
    slot->begin("exchange", 99);
    slot->waited_for = true;
    for (int i = 0; i < 12; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(150));
      if (progress) slot->end();
    }
    _exit(0);
  };
  EXPECT_EXIT(hang(false), testing::ExitedWithCode(4), "exchange 1 of group context has not ended");
  const FirstError error = read_first_error(folder_);
  EXPECT_EQ(error.code, 4);
  EXPECT_NE(error.text.find("log.watchdog_seconds = 0.6"), std::string::npos) << error.text;
  EXPECT_NE(error.text.find("who: rank 0"), std::string::npos) << error.text;
  EXPECT_EXIT(hang(true), testing::ExitedWithCode(0), "");
}

TEST_F(RecordTest, TheFirstErrorStaysAndTheOthersFollowItsCode) {
  const auto fail = [this] {
    RunRecords records(/*json=*/true);
    records.open(folder_, alone_, "rank 0", 60);
    records.fail(Error(ExitCode::kDiverged, "loss nan", Fix("lower it"), __FILE__, __LINE__));
  };
  EXPECT_EXIT(fail(), testing::ExitedWithCode(5), "\"what\": \"loss nan\"");
  EXPECT_NE(read_first_error(folder_).text.find("\"who\": \"rank 0\""), std::string::npos);
  const auto follow = [this] {
    RunRecords records(/*json=*/false);
    records.open(folder_, alone_, "rank 0", 60);
    OutputFile(folder_ + "/ranks/first-error").append("2\nerror: another rank\n");
    records.fail(Error(ExitCode::kDiverged, "a consequence", Fix("none"), __FILE__, __LINE__));
  };
  EXPECT_EXIT(follow(), testing::ExitedWithCode(2), "^$");
  EXPECT_EQ(read_first_error(folder_).text, "error: another rank\n");
}

// Two launches on one folder: each answers for its own ranks alone.
TEST_F(RecordTest, AnotherLaunchsErrorIsNotReadAsOnesOwn) {
  std::filesystem::create_directories(folder_ + "/ranks");
  OutputFile(folder_ + "/ranks/first-error").append("4 77-abc vanished\nerror: theirs\n");
  EXPECT_EQ(read_first_error(folder_, "78-def").code, 0);
  const FirstError own = read_first_error(folder_, "77-abc");
  EXPECT_EQ(own.code, 4);
  EXPECT_TRUE(own.vanished);
  EXPECT_EQ(own.text, "error: theirs\n");
}

TEST_F(RecordTest, WithoutAFailureThereIsNoFirstError) { EXPECT_EQ(read_first_error(folder_).code, 0); }

}  // namespace
}  // namespace marrow
