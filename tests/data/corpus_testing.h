// What the tests of corpora share: a folder of their own, files in it, corpora out of token lists.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "base/error.h"
#include "data/indexed_corpus.h"

namespace marrow {

class CorpusFolder : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ =
        testing::TempDir() + "marrow_" + std::to_string(getpid()) + "_" + info->test_suite_name() + "_" + info->name();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  std::string write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << text;
    return path(name);
  }

  // A corpus of the given documents; returns its prefix.
  std::string corpus(const std::string& name, const std::vector<std::vector<int32_t>>& documents,
                     int64_t vocab_size = 257, const std::string& hash = "h") const {
    CorpusWriter writer(path(name), {"test", hash, vocab_size, {}}, true);
    for (const auto& document : documents) {
      const auto length = static_cast<int32_t>(document.size());
      writer.append(document, {&length, 1});
    }
    writer.finish();
    return path(name);
  }

  std::string folder_;
};

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The error that `act` throws; a test failure if it throws none, or one that lacks a fix.
inline ErrorReport error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_FALSE(error.report().fix.empty());
    return error.report();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << part << "\" is missing in: " << text;
  }
}

}  // namespace marrow
