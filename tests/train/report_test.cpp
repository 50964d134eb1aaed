#include "ops/pch.h"

#include "train/run_report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "train/metrics.h"

namespace marrow {
namespace {

class ReportTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = (std::filesystem::temp_directory_path() / fmt::format("marrow-report-{}", getpid())).string();
    std::filesystem::remove_all(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  static size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
    return n;
  }
  std::string dir_;
};

TEST_F(ReportTest, DrawsTheMemoryOfATracedStep) {
  {
    MetricsWriter writer(dir_, 0);
    StepMetrics m;
    m.step = 1;
    m.loss = 5.0;
    writer.write(m);
  }
  const auto memory = [](double ts, int device, double total) {
    return fmt::format(R"({{"name": "[memory]", "ts": {}, "args": {{"Device Type": {}, "Total Allocated": {}}}}})", ts,
                       device, total);
  };
  std::ofstream(dir_ + "/trace-00000001.json")
      << R"({"traceEvents": [{"name": "aten::mm", "ts": 1}, )" << memory(1000, 0, 9e9) << ", " << memory(2000, 1, 1e9)
      << ", " << memory(6000, 1, 4e9) << ", " << memory(12000, 1, 2e9) << "]}";
  std::ofstream(dir_ + "/run.toml") << "[log]\nmemory_trace = false\n";
  EXPECT_EQ(read_text_file(write_run_report(dir_).path).find("Memory in use"), std::string::npos);
  std::ofstream(dir_ + "/run.toml") << "[log]\nmemory_trace = true\n";
  const std::string page = read_text_file(write_run_report(dir_).path);
  const size_t chart = page.find("Memory in use (GB), trace-00000001.json");
  ASSERT_NE(chart, std::string::npos);
  // The GPU's three points over 10 ms, the largest at the top of the chart.
  EXPECT_NE(page.find("ms 10<", chart), std::string::npos);
  EXPECT_NE(page.find("points=\"58.0,157.0 258.8,10.0 560.0,108.0 \"", chart), std::string::npos);
  std::ofstream(dir_ + "/trace-00000002.json") << R"({"traceEvents": [{"name": "[mem)";  // cut off
  EXPECT_NE(read_text_file(write_run_report(dir_).path).find("<p>" + dir_ + "/trace-00000002.json"), std::string::npos);
}

TEST_F(ReportTest, OnePageWithEveryChartAndNoOutsideResource) {
  {
    MetricsWriter writer(dir_, 0);
    for (int64_t step = 1; step <= 5000; ++step) {
      StepMetrics m;
      m.step = step;
      m.loss = step == 3333 ? 77.5 : 5.0;  // one spike, which thinning must keep
      m.mfu = std::nan("");
      m.tokens = 100;
      writer.write(m);
    }
    writer.write_validation(5000, 2.25);
  }
  std::ofstream(dir_ + "/run.toml") << "[log]\ndir = \"<b>\"\n";
  const RunSummary summary = write_run_report(dir_);
  EXPECT_EQ(summary.steps, 5000);
  EXPECT_EQ(summary.loss, 5.0);
  EXPECT_EQ(summary.validation_loss, 2.25);
  const std::string page = read_text_file(summary.path);
  EXPECT_EQ(count(page, "<svg "), 9u);
  EXPECT_EQ(count(page, "<svg "), count(page, "</svg>"));
  EXPECT_EQ(count(page, "<div"), count(page, "</div>"));
  EXPECT_NE(page.find(",10.0 "), std::string::npos);  // the spike, at the top of its chart
  EXPECT_NE(page.find("dir = &#34;&#60;b&#62;&#34;"), std::string::npos);
  for (const char* outside : {"http:", "https:", "src=", "href=", "@import", "nan", "inf "}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
  EXPECT_LT(page.size(), 300'000u);
}

TEST_F(ReportTest, ARunWithoutAFinishedStepStillHasAPage) {
  { MetricsWriter writer(dir_, 0); }
  std::ofstream(dir_ + "/metrics.jsonl") << "{\"step\": 1, \"lo";
  const RunSummary summary = write_run_report(dir_);
  EXPECT_EQ(summary.steps, 0);
  EXPECT_TRUE(std::isnan(summary.loss));
  EXPECT_EQ(read_text_file(summary.path).find("nan"), std::string::npos);
}

TEST_F(ReportTest, FaultsNameFileLineAndFix) {
  try {
    write_run_report(dir_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.report().code, ExitCode::kUsage);
    EXPECT_NE(error.report().what.find("metrics.jsonl does not exist"), std::string::npos);
    EXPECT_NE(error.report().fix.find("[log] dir"), std::string::npos);
  }
  std::filesystem::create_directories(dir_);
  std::ofstream(dir_ + "/metrics.jsonl") << "{\"step\": 1}\n{broken\n";
  try {
    write_run_report(dir_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.report().code, ExitCode::kBadInput);
    EXPECT_NE(error.report().what.find("metrics.jsonl:2"), std::string::npos);
  }
}

}  // namespace
}  // namespace marrow
