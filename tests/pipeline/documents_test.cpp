// Packed documents: attention and positions restart, and nothing crosses a boundary.
#include "toy_model.h"

namespace marrow::test {
namespace {

std::vector<int32_t> starts_of(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> starts;
  for (const int32_t length : lengths) {
    starts.insert(starts.end(), length, static_cast<int32_t>(starts.size()));
  }
  return starts;
}

at::Tensor outputs(ToyModel& toy, const std::vector<int32_t>& tokens, const std::vector<int32_t>& starts) {
  return toy.executor().hidden_states(make_micro_batch(tokens, tokens, starts, 1, 64, /*documents=*/true, at::kCPU));
}

TEST(Documents, ATokenReachesOnlyItsOwnDocument) {
  ToyModel toy({});
  const std::vector<int32_t> starts = starts_of({1, 7, 31, 25});
  std::vector<int32_t> tokens = random_tokens(1, 64, 31)[0];
  const at::Tensor before = outputs(toy, tokens, starts);
  tokens[3] = (tokens[3] + 1) % 512;
  const at::Tensor change = (outputs(toy, tokens, starts) - before).norm(2, 1) / before.norm(2, 1);
  for (int64_t i = 0; i < 64; ++i) {
    const double moved = change[i].item<double>();
    if (i >= 3 && i <= 7) {
      EXPECT_GT(moved, 1e-4) << "position " << i;
    } else {
      EXPECT_LE(moved, 1e-5) << "position " << i;
    }
  }
}

TEST(Documents, PositionsRestart) {
  const std::vector<int32_t> starts = starts_of({1, 7, 31, 25});
  const MicroBatch batch = make_micro_batch(starts, starts, starts, 1, 64, true, at::kCPU);
  const auto* positions = batch.context.positions.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(positions[i], i - starts[i]);
  EXPECT_EQ(batch.context.attention.document_offsets, (std::vector<int32_t>{0, 1, 8, 39, 64}));
}

TEST(Documents, APackedDocumentEqualsTheDocumentAlone) {
  ToyModel toy({});
  const std::vector<int32_t> tokens = random_tokens(1, 64, 32)[0];
  const at::Tensor packed = outputs(toy, tokens, starts_of({16, 16, 16, 16}));
  for (int64_t d = 0; d < 4; ++d) {
    const std::vector<int32_t> alone(tokens.begin() + d * 16, tokens.begin() + (d + 1) * 16);
    const std::vector<int32_t> zero(16, 0);
    const at::Tensor expected =
        toy.executor().hidden_states(make_micro_batch(alone, alone, zero, 1, 16, true, at::kCPU));
    EXPECT_LE(relative_difference(packed.narrow(0, d * 16, 16), expected), 1e-5);
  }
}

}  // namespace
}  // namespace marrow::test
