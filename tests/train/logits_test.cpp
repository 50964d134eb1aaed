// Logits of models against transformers: DeepSeek far into a sequence (case A1), and for $MARROW_LOGITS, a folder of
// NAME/ and NAME.safetensors, those of tests/oracle/family_cases.py.
#include "ops/pch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "models/safetensors.h"
#include "train/inference_model.h"

namespace marrow {
namespace {

namespace fs = std::filesystem;

TEST(Logits, EqualTransformers) {
  const char* given = std::getenv("MARROW_LOGITS");
  const std::string made = (fs::temp_directory_path() / fmt::format("marrow-logits-{}", getpid())).string();
  const std::string dir = given != nullptr ? given : made;
  if (given == nullptr) {
    fs::create_directories(dir);
    const std::string command =
        fmt::format("{0}/.venv/bin/python {0}/tests/oracle/deepseek_v2_logits.py {1}", MARROW_SOURCE_DIR, dir);
    ASSERT_EQ(std::system(command.c_str()), 0);
  }
  Logger logger;
  logger.set_quiet(true);
  int models = 0;
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (!entry.is_directory()) continue;
    const std::string folder = entry.path().string();
    SCOPED_TRACE(entry.path().filename().string());
    const TensorFiles expected({folder + ".safetensors"});
    const at::Tensor tokens = expected.read_whole("tokens"), positions = expected.read_whole("positions");
    const at::Tensor reference = expected.read_whole("logits").to(at::kDouble);  // [positions, V]
    const std::vector<int32_t> unused(static_cast<size_t>(tokens.numel()));
    InferenceModel model(folder, false, logger);
    const at::Tensor hidden = model.executor->hidden_states(make_micro_batch(
        {tokens.const_data_ptr<int32_t>(), unused.size()}, unused, unused, 1, tokens.numel(), false, at::kCPU));
    const at::Tensor logits = model.executor->logits(hidden.index_select(0, positions)).to(at::kDouble);
    for (int64_t i = 0; i < positions.numel(); ++i) {
      const double error = (logits[i] - reference[i]).norm().item<double>() / reference[i].norm().item<double>();
      EXPECT_LE(error, 1e-4) << "position " << positions[i].item<int64_t>();
    }
    ++models;
  }
  EXPECT_GE(models, given != nullptr ? 1 : 4);
  if (given == nullptr) fs::remove_all(dir);
}

}  // namespace
}  // namespace marrow
