#include "ops/pch.h"
// After the precompiled header:
#include "ops/embedding.h"
#include "ops/op_test_support.h"

namespace marrow {
namespace {

at::Tensor random_ids(int64_t tokens, int64_t vocabulary, at::Device device) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{17});
  return at::randint(vocabulary, {tokens}, generator, at::kInt).to(device);
}

TEST(Embedding, MatchesPlainComposition) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t tokens : {0, 1, 37, 1025}) {
        for (const int64_t hidden : {1, 7, 64, 258}) {
          for (const bool deterministic : {false, true}) {
            SCOPED_TRACE(fmt::format("{} tokens of {} {} {} deterministic {}", tokens, hidden, c10::toString(dtype),
                                     device.str(), deterministic));
            const Parameter weight = make_parameter(random_tensor({53, hidden}, dtype, device, 1));
            const at::Tensor ids = random_ids(tokens, 53, device);
            const at::Tensor out = embedding_forward(ids, weight);
            EXPECT_TRUE(tensors_identical(out, weight.value.index_select(0, ids)));
            EXPECT_FALSE(out.requires_grad());

            const at::Tensor d = random_tensor({tokens, hidden}, dtype, device, 2);
            weight.grad.fill_(1.0);  // the gradient is added
            embedding_backward(ids, d, weight, deterministic);
            const at::Tensor expected =
                at::ones({53, hidden}, at::kDouble).index_add(0, ids.cpu(), d.to(at::kCPU, at::kDouble));
            EXPECT_TRUE(tensors_close(weight.grad, expected, 1e-6, 1e-5));
          }
        }
      }
    }
  }
}

TEST(Embedding, DeterministicRepeatsToTheBit) {
  for (const at::Device device : test_devices()) {
    const Parameter weight = make_parameter(at::zeros({3, 128}, at::TensorOptions().device(device)));
    const at::Tensor ids = random_ids(4099, 3, device);  // long runs of each id
    const at::Tensor d = random_tensor({4099, 128}, at::kFloat, device, 2);
    embedding_backward(ids, d, weight, true);
    const at::Tensor once = weight.grad.clone();
    for (int repeat = 0; repeat < 5; ++repeat) {
      weight.grad.zero_();
      embedding_backward(ids, d, weight, true);
      EXPECT_TRUE(tensors_identical(weight.grad, once));
    }
  }
}

TEST(Embedding, AnIdOutsideTheVocabularyIsNamed) {
  const Parameter weight = make_parameter(at::zeros({10, 4}), "embedding");
  for (const int32_t bad : {10, -1}) {
    try {
      embedding_forward(at::tensor({1, bad}, at::kInt), weight);
      FAIL() << "no error for " << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kBadInput);
      EXPECT_NE(error.report().what.find(fmt::format("token id {} at position 1", bad)), std::string::npos)
          << error.report().what;
    }
  }
}

TEST(Embedding, NoGradientNoWork) {
  const Parameter weight{"embedding", at::zeros({10, 4}), {}};
  embedding_backward(at::tensor({1, 2}, at::kInt), at::ones({2, 4}), weight);
  EXPECT_FALSE(weight.grad.defined());
}

}  // namespace
}  // namespace marrow
