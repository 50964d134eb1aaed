#include "ops/pch.h"

#include "train/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "base/json.h"

namespace marrow {
namespace {

class MetricsTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = (std::filesystem::temp_directory_path() / fmt::format("marrow-metrics-{}", getpid())).string();
    std::filesystem::remove_all(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::vector<Json> lines() const {
    std::vector<Json> out;
    std::ifstream file(dir_ + "/metrics.jsonl");
    for (std::string line; std::getline(file, line);) out.push_back(Json::parse(line, "line"));
    return out;
  }
  static std::vector<std::string> keys(const Json& line) {
    std::vector<std::string> out;
    for (const auto& [key, value] : line.items()) out.push_back(key);
    return out;
  }
  static StepMetrics step_metrics(int64_t step) {
    StepMetrics m;
    m.step = step;
    m.loss = 5.0 / static_cast<double>(step);
    m.balance_loss_per_layer = {1.0, 1.5};
    return m;
  }
  std::string dir_;
};

TEST_F(MetricsTest, NumbersReadBackToTheSameBits) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 2000; ++round) {
    StepMetrics m = step_metrics(round + 1);
    double* fields[] = {&m.loss, &m.grad_norm, &m.lr, &m.balance_loss_per_layer[1]};
    for (double* field : fields) {
      do {
        *field = std::bit_cast<double>(random());
      } while (!std::isfinite(*field));
    }
    m.peak_memory_bytes = static_cast<int64_t>(random() >> 1);
    const Json line = Json::parse(metrics_json(m), "line");
    EXPECT_EQ(line.at("loss").as_double(), m.loss);
    EXPECT_EQ(line.at("grad_norm").as_double(), m.grad_norm);
    EXPECT_EQ(line.at("lr").as_double(), m.lr);
    EXPECT_EQ(line.at("balance_loss_per_layer").at(1).as_double(), m.balance_loss_per_layer[1]);
    EXPECT_EQ(line.at("peak_memory_bytes").as_int(), m.peak_memory_bytes);
  }
}

TEST_F(MetricsTest, FieldsOfALineAreTheDocumentedOnes) {
  std::vector<std::string> names = {"step",
                                    "loss",
                                    "balance_loss",
                                    "balance_loss_per_layer",
                                    "grad_norm",
                                    "lr",
                                    "tokens",
                                    "step_seconds",
                                    "tokens_per_second",
                                    "tflops_per_gpu",
                                    "mfu",
                                    "peak_memory_bytes",
                                    "expert_load_max_over_mean"};
  std::ranges::sort(names);  // as Json gives them
  EXPECT_EQ(keys(Json::parse(metrics_json({}), "line")), names);
  StepMetrics unknown_peak;
  unknown_peak.mfu = std::nan("");
  EXPECT_TRUE(Json::parse(metrics_json(unknown_peak), "line").at("mfu").is_null());
}

TEST_F(MetricsTest, EachLineIsVisibleAtOnce) {
  MetricsWriter writer(dir_, 0);
  writer.write(step_metrics(1));
  EXPECT_EQ(lines().size(), 1u);
  writer.write_validation(1, 3.25);
  ASSERT_EQ(lines().size(), 2u);
  EXPECT_EQ(keys(lines()[1]), (std::vector<std::string>{"step", "validation_loss"}));
  EXPECT_EQ(lines()[1].at("validation_loss").as_double(), 3.25);
}

TEST_F(MetricsTest, ResumeDropsWhatComesAfterAndWhatWasCutOff) {
  {
    MetricsWriter writer(dir_, 0);
    for (int64_t step = 1; step <= 6; ++step) writer.write(step_metrics(step));
    writer.write_validation(6, 1.0);
    std::ofstream(dir_ + "/metrics.jsonl", std::ios::app) << "{\"step\": 2, \"lo";
  }
  MetricsWriter writer(dir_, 4);
  ASSERT_EQ(lines().size(), 4u);
  writer.write(step_metrics(5));
  ASSERT_EQ(lines().size(), 5u);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(lines()[i].at("step").as_int(), static_cast<int64_t>(i) + 1);
  }
  MetricsWriter anew(dir_, 0);
  EXPECT_TRUE(lines().empty());
}

TEST_F(MetricsTest, ABadLineIsNamedWithAWayOut) {
  for (const char* bad : {"{\"step\": 2, bad}", "{\"loss\": 2.5}", "[]"}) {
    std::filesystem::remove_all(dir_);
    MetricsWriter(dir_, 0).write(step_metrics(1));
    std::ofstream(dir_ + "/metrics.jsonl", std::ios::app) << bad << "\n";
    try {
      MetricsWriter(dir_, 4);
      FAIL() << "accepted " << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kBadInput);
      EXPECT_NE(error.report().what.find(dir_ + "/metrics.jsonl:2"), std::string::npos) << error.report().what;
      EXPECT_NE(error.report().fix.find("sed -i 2d " + dir_ + "/metrics.jsonl"), std::string::npos);
    }
  }
}

TEST_F(MetricsTest, ConsoleLineHoldsLossSpeedAndTimeLeft) {
  StepMetrics m = step_metrics(10);
  m.mfu = std::nan("");
  m.tokens_per_second = 12345;
  m.step_seconds = 2.0;
  const std::string line = console_line(m, 110);
  for (const char* part : {"step 10/110", "loss 0.5000", "12.3k tokens/s", "eta 3m20s"}) {
    EXPECT_NE(line.find(part), std::string::npos) << line;
  }
  EXPECT_EQ(line.find("mfu"), std::string::npos);
  EXPECT_LE(line.size(), 120u);
}

}  // namespace
}  // namespace marrow
