#include "base/files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

namespace marrow {
namespace {

namespace fs = std::filesystem;

class FilesTest : public ::testing::Test {
 protected:
  FilesTest() : folder_((fs::temp_directory_path() / fmt::format("marrow-files-{}", getpid())).string()) {
    fs::create_directories(folder_);
  }
  ~FilesTest() override { fs::remove_all(folder_); }
  std::string folder_;
};

TEST_F(FilesTest, StagedFolderAppearsWholeOrNotAtAll) {
  const std::string target = folder_ + "/made/target";
  fs::create_directories(folder_ + "/made/.target.tmp");  // a user's, as are these
  for (const char* own : {"/made/target.tmp", "/made/file.tmp"}) write_text_file_atomically(folder_ + own, "mine");
  {
    StagedFolder staged(target, 10);
    staged.write_text("a.txt", "one");
    EXPECT_FALSE(fs::exists(target));
  }
  EXPECT_FALSE(fs::exists(staging_path(target)));  // not published: removed
  fs::create_directories(staging_path(target) + "/stale");
  StagedFolder staged(target, 10);
  staged.write_text("a.txt", "two");
  staged.publish();
  EXPECT_EQ(read_text_file(target + "/a.txt"), "two");
  EXPECT_FALSE(fs::exists(target + "/stale"));

  StagedFolder replacement(target, 10);
  replacement.write_text("b.txt", "three");
  replacement.publish();
  EXPECT_FALSE(fs::exists(target + "/a.txt"));
  EXPECT_EQ(read_text_file(target + "/b.txt"), "three");
  EXPECT_FALSE(fs::exists(staging_path(target)));
  write_text_file_atomically(folder_ + "/made/file", "four");
  for (const char* own : {"/made/target.tmp", "/made/file.tmp"}) EXPECT_EQ(read_text_file(folder_ + own), "mine");
  EXPECT_TRUE(fs::exists(folder_ + "/made/.target.tmp"));
  EXPECT_THROW(check_output_is_new(target, "--output"), Error);
  EXPECT_NO_THROW(check_output_is_new(folder_ + "/new", "--output"));
}

TEST_F(FilesTest, NamesBytesWantedAndFree) {
  try {
    StagedFolder staged(folder_ + "/huge", int64_t{1} << 60);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.report().code, ExitCode::kDeviceFault);
    for (const char* part : {"1152921504606846976", "/huge", "free"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace marrow
