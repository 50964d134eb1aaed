#include "parallel/context_delta_rule.h"

#include "ops/gated_delta_rule.h"
#include "ops/op_test_support.h"
#include "ops/short_convolution.h"
#include "parallel/context_attention.h"
#include "parallel/thread_communicator.h"

namespace marrow {
namespace {

// Chunks of one token and more, documents that end at a chunk, within one, and that span several.
std::vector<AttentionLayout> layouts() {
  return {{1, 16, {}, 0},
          {2, 48, {}, 0},
          {1, 64, {0, 1, 8, 39, 64}, 0},
          {1, 64, {0, 16, 32, 48, 64}, 0},
          {2, 64, {0, 1, 8, 39, 64, 64, 80, 96, 112, 128, 128}, 0},
          {2, 240, {0, 0, 3, 150, 151, 240, 240, 480}, 0},
          {2, 768, {0, 100, 700, 768, 1536}, 0}};
}

// The rank's rows among those of the micro-batch.
at::Tensor rows_of(const AttentionLayout& layout, const Communicator& ring) {
  std::vector<int64_t> rows;
  for (int64_t s = 0; s < layout.sequences; ++s) {
    for (const int64_t i : zigzag_positions(layout.seq_len, ring.size(), ring.rank())) {
      rows.push_back(s * layout.seq_len + i);
    }
  }
  return at::tensor(rows);
}

at::Tensor starts_of(const AttentionLayout& layout, at::Device device) {
  std::vector<int32_t> starts = layout.document_offsets;
  for (int64_t s = 0; layout.document_offsets.empty() && s <= layout.sequences; ++s) {
    starts.push_back(static_cast<int32_t>(s * layout.seq_len));
  }
  return at::tensor(starts, at::kInt).to(device);
}

// run(inputs that require a gradient, ring) on the ranks' rows → what it gives and the inputs' gradients, of all rows.
template <typename Run>
std::vector<at::Tensor> on_ranks(int64_t cp, const AttentionLayout& layout, const std::vector<at::Tensor>& inputs,
                                 const at::Tensor& d_out, const Run& run) {
  std::vector<at::Tensor> whole{at::full_like(d_out, NAN)};
  for (const at::Tensor& input : inputs) whole.push_back(at::full_like(input, NAN));
  std::mutex mutex;
  test::run_ranks(cp, [&](Communicator& ring) {
    const at::Tensor rows = rows_of(layout, ring).to(d_out.device());
    std::vector<at::Tensor> own;
    for (const at::Tensor& input : inputs) own.push_back(with_grad(input.index_select(0, rows)));
    const at::Tensor out = run(own, ring);
    out.backward(d_out.index_select(0, rows));
    const std::lock_guard lock(mutex);
    whole[0].index_copy_(0, rows, out.detach());
    for (size_t i = 0; i < own.size(); ++i) whole[i + 1].index_copy_(0, rows, own[i].grad());
  });
  return whole;
}

// Calls body(layout, cp, dtype, device) for all whose sequences can be cut.
template <typename Body>
void for_cases(const Body& body) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const AttentionLayout& layout : layouts()) {
        for (const int64_t cp : {1, 2, 3, 4, 8}) {
          if (layout.seq_len % (2 * cp) != 0) continue;
          SCOPED_TRACE(fmt::format("cp {}, {} × {} tokens, {} document offsets, {} {}", cp, layout.sequences,
                                   layout.seq_len, layout.document_offsets.size(), c10::toString(dtype), device.str()));
          body(layout, cp, dtype, device);
        }
      }
    }
  }
}

TEST(ContextDeltaRule, MatchesOneRank) {
  for_cases([](const AttentionLayout& layout, int64_t cp, at::ScalarType dtype, at::Device device) {
    const int64_t tokens = layout.sequences * layout.seq_len, key_heads = 2, heads = 4, key_size = 16, value_size = 24;
    const std::vector<at::Tensor> inputs{random_tensor({tokens, key_heads, key_size}, dtype, device, 1),
                                         random_tensor({tokens, key_heads, key_size}, dtype, device, 2),
                                         random_tensor({tokens, heads, value_size}, dtype, device, 3),
                                         random_tensor({tokens, heads}, at::kFloat, device, 4).abs().mul_(-0.05),
                                         random_tensor({tokens, heads}, at::kFloat, device, 5).sigmoid_()};
    const at::Tensor d_out = random_tensor({tokens, heads, value_size}, dtype, device, 6);
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& input : inputs) leaves.push_back(with_grad(input.to(at::kCPU, at::kFloat)));
    const at::Tensor expected =
        gated_delta_rule(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], starts_of(layout, at::kCPU), {}).out;
    expected.backward(d_out.to(at::kCPU, at::kFloat));
    const std::vector<at::Tensor> got =
        on_ranks(cp, layout, inputs, d_out, [&](const std::vector<at::Tensor>& own, Communicator& ring) {
          return context_gated_delta_rule(own[0], own[1], own[2], own[3], own[4], layout, &ring);
        });
    const double tolerance = dtype == at::kFloat ? 2e-5 : 3e-2;
    EXPECT_TRUE(tensors_close(got[0], expected, tolerance, tolerance)) << "out";
    constexpr const char* names[] = {"q", "k", "v", "g", "beta"};
    for (size_t i = 0; i < inputs.size(); ++i) {
      const double largest = std::max(1.0, leaves[i].grad().abs().max().item<double>());
      EXPECT_TRUE(tensors_close(got[i + 1], leaves[i].grad(), tolerance, tolerance * largest)) << names[i];
    }
  });
}

TEST(ContextShortConvolution, MatchesOneRank) {
  for_cases([](const AttentionLayout& layout, int64_t cp, at::ScalarType dtype, at::Device device) {
    for (const int64_t kernel : {1, 2, 4}) {
      const int64_t tokens = layout.sequences * layout.seq_len, channels = 12;
      const at::Tensor x = random_tensor({tokens, channels}, dtype, device, 1);
      const at::Tensor d_out = random_tensor({tokens, channels}, dtype, device, 2);
      const at::Tensor filter = random_tensor({channels, kernel}, dtype, device, 3);
      const at::Tensor leaf = with_grad(x.to(at::kCPU, at::kFloat));
      const Parameter plain = make_parameter(filter.to(at::kCPU, at::kFloat));
      const at::Tensor expected = short_convolution(leaf, plain, starts_of(layout, at::kCPU), {});
      expected.backward(d_out.to(at::kCPU, at::kFloat));

      std::vector<Parameter> weights;  // of each rank
      for (int64_t rank = 0; rank < cp; ++rank) weights.push_back(make_parameter(filter));
      const std::vector<at::Tensor> got =
          on_ranks(cp, layout, {x}, d_out, [&](const std::vector<at::Tensor>& own, Communicator& ring) {
            return context_short_convolution(own[0], weights[ring.rank()], layout, &ring);
          });
      at::Tensor d_filter = weights[0].grad;
      for (int64_t rank = 1; rank < cp; ++rank) d_filter = d_filter + weights[rank].grad;
      const double tolerance = dtype == at::kFloat ? 1e-5 : 1.5e-2;
      EXPECT_TRUE(tensors_close(got[0], expected, tolerance, tolerance)) << "out, kernel " << kernel;
      EXPECT_TRUE(tensors_close(got[1], leaf.grad(), tolerance, 2 * tolerance)) << "dx, kernel " << kernel;
      EXPECT_TRUE(tensors_close(d_filter, plain.grad, tolerance, tolerance * std::sqrt(tokens))) << "d_weight";
    }
  });
}

TEST(ContextDeltaRule, SequencesThatCannotBeCutAreRefused) {
  test::run_ranks(2, [](Communicator& ring) {
    const Parameter weight = make_parameter(at::ones({4, 4}));
    EXPECT_THROW(context_short_convolution(at::ones({5, 4}), weight, {1, 10, {}, 0}, &ring), Error);
  });
}

}  // namespace
}  // namespace marrow
