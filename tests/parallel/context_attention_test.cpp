#include "ops/pch.h"
// After the precompiled header:
#include "ops/op_test_support.h"
#include "parallel/context_attention.h"
#include "parallel/thread_communicator.h"

namespace marrow {
namespace {

struct Case {
  AttentionLayout layout;
  int64_t q_heads, kv_heads, size, value_size;
};

std::vector<Case> cases() {
  return {
      {{1, 16, {}, 0}, 1, 1, 8, 8},  // chunks of one token at cp = 8
      {{1, 48, {}, 0}, 4, 2, 16, 16},
      {{3, 240, {}, 0}, 4, 1, 8, 8},
      {{2, 48, {}, 0}, 2, 2, 24, 16},  // as MLA: value heads of another size
      {{1, 64, {0, 1, 8, 39, 64}, 0}, 4, 2, 16, 16},
      {{1, 64, {0, 16, 32, 48, 64}, 0}, 4, 2, 16, 16},
      {{2, 64, {0, 1, 8, 39, 64, 64, 80, 96, 112, 128, 128}, 0}, 2, 1, 8, 8},
      {{2, 48, {0, 0, 5, 48, 48, 96}, 0}, 6, 3, 8, 8},
      {{2, 48, {}, 1}, 2, 1, 8, 8},
      {{1, 48, {}, 2}, 2, 1, 8, 8},
      {{2, 240, {}, 11}, 4, 2, 8, 8},
      {{1, 240, {}, 70}, 2, 1, 8, 8},
      {{1, 48, {}, 500}, 2, 1, 8, 8},
      {{2, 240, {0, 3, 150, 151, 240, 400, 480}, 37}, 2, 1, 8, 8},
      {{1, 64, {0, 1, 8, 39, 64}, 1}, 2, 1, 8, 8},
  };
}

std::string name_of(const Case& c, int64_t cp) {
  return fmt::format("cp {}, {} × {} tokens, {} document offsets, window {}, {}/{} heads of {} and {}", cp,
                     c.layout.sequences, c.layout.seq_len, c.layout.document_offsets.size(), c.layout.window, c.q_heads,
                     c.kv_heads, c.size, c.value_size);
}

// Calls body(case, cp) for all whose sequences can be cut.
template <typename Body>
void for_cases(const Body& body) {
  for (const Case& c : cases()) {
    for (const int64_t cp : {1, 2, 3, 4, 8}) {
      if (c.layout.seq_len % (2 * cp) != 0) continue;
      SCOPED_TRACE(name_of(c, cp));
      body(c, cp);
    }
  }
}

// The rank's rows among those of the micro-batch.
at::Tensor rows_of(const AttentionLayout& layout, int64_t cp, int64_t c) {
  std::vector<int64_t> rows;
  for (int64_t s = 0; s < layout.sequences; ++s) {
    for (const int64_t position : zigzag_positions(layout.seq_len, cp, c))
      rows.push_back(s * layout.seq_len + position);
  }
  return at::tensor(rows);
}

// {out, dq, dk, dv} of the whole micro-batch: each rank computes its rows on a thread. d_sinks += the ranks' gradients.
std::vector<at::Tensor> on_ranks(int64_t cp, const std::vector<at::Tensor>& inputs, const AttentionLayout& layout,
                                 double scale, bool deterministic, const Parameter& sinks = {}) {
  const at::Tensor &q = inputs[0], &k = inputs[1], &v = inputs[2], &d = inputs[3];
  std::vector<at::Tensor> whole{at::full_like(d, NAN), at::full_like(q, NAN), at::full_like(k, NAN),
                                at::full_like(v, NAN)};
  std::mutex mutex;
  test::run_ranks(cp, [&](Communicator& ring) {
    const at::Tensor rows = rows_of(layout, cp, ring.rank()).to(q.device());
    const auto own = [&](const at::Tensor& x) { return with_grad(x.index_select(0, rows)); };
    const at::Tensor own_q = own(q), own_k = own(k), own_v = own(v);
    const Parameter own_sinks = sinks.value.defined() ? make_parameter(sinks.value, "sinks") : Parameter{};
    const at::Tensor out = context_attention(own_q, own_k, own_v, layout, scale, deterministic, &ring, own_sinks);
    EXPECT_EQ(out.scalar_type(), q.scalar_type());
    EXPECT_TRUE(out.is_contiguous());
    out.backward(d.index_select(0, rows));
    const std::lock_guard lock(mutex);
    if (sinks.grad.defined()) sinks.grad.add_(own_sinks.grad);
    const std::array results{out.detach(), own_q.grad(), own_k.grad(), own_v.grad()};
    for (size_t i = 0; i < results.size(); ++i) whole[i].index_copy_(0, rows, results[i]);
  });
  return whole;
}

std::vector<at::Tensor> random_inputs(const Case& c, at::ScalarType dtype, at::Device device) {
  const int64_t tokens = c.layout.sequences * c.layout.seq_len;
  return {random_tensor({tokens, c.q_heads, c.size}, dtype, device, 1),
          random_tensor({tokens, c.kv_heads, c.size}, dtype, device, 2),
          random_tensor({tokens, c.kv_heads, c.value_size}, dtype, device, 3),
          random_tensor({tokens, c.q_heads, c.value_size}, dtype, device, 4)};
}

// bf16 on the GPU runs library kernels, which offer documents and windows for equal head sizes alone.
bool offered(const Case& c, int64_t cp, at::ScalarType dtype, at::Device device, bool deterministic) {
  if (device.is_cpu() || dtype == at::kFloat || c.size == c.value_size) return true;
  return !deterministic && c.layout.seq_len > 2 * cp;
}

TEST(ContextAttention, MatchesOneRank) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const bool deterministic : {false, true}) {
        if (deterministic && device.is_cpu()) continue;  // one path
        for_cases([&](const Case& c, int64_t cp) {
          if (!offered(c, cp, dtype, device, deterministic)) return;
          SCOPED_TRACE(fmt::format("{} {}, deterministic {}", c10::toString(dtype), device.str(), deterministic));
          const double scale = 1.0 / std::sqrt(static_cast<double>(c.size));
          const std::vector<at::Tensor> inputs = random_inputs(c, dtype, device);
          std::vector<at::Tensor> leaves;
          for (int i = 0; i < 3; ++i) leaves.push_back(with_grad(inputs[i].to(at::kCPU, at::kFloat)));
          const at::Tensor expected = attention(leaves[0], leaves[1], leaves[2], c.layout, scale);
          expected.backward(inputs[3].to(at::kCPU, at::kFloat));

          const std::vector<at::Tensor> results = on_ranks(cp, inputs, c.layout, scale, deterministic);
          const double tolerance = dtype == at::kFloat ? 1e-5 : 1.5e-2;
          EXPECT_TRUE(tensors_close(results[0], expected, tolerance, tolerance)) << "out";
          EXPECT_TRUE(tensors_close(results[1], leaves[0].grad(), 2 * tolerance, 2 * tolerance)) << "dq";
          EXPECT_TRUE(tensors_close(results[2], leaves[1].grad(), 2 * tolerance, 3 * tolerance)) << "dk";
          EXPECT_TRUE(tensors_close(results[3], leaves[2].grad(), 2 * tolerance, 3 * tolerance)) << "dv";
        });
      }
    }
  }
}

// Large enough for the kernels' blocks to have inner ones, and scores large enough that the merge counts.
TEST(ContextAttention, MatchesOneRankOnLongerSequences) {
  for (const at::Device device : test_devices()) {
    const at::ScalarType dtype = device.is_cpu() ? at::kFloat : at::kBFloat16;
    for (const auto& layout : {AttentionLayout{2, 1536, {}, 0}, AttentionLayout{1, 1536, {}, 300},
                               AttentionLayout{2, 768, {0, 100, 700, 768, 1200, 1536}, 0}}) {
      const Case c{layout, 4, 2, 64, 64};
      std::vector<at::Tensor> inputs = random_inputs(c, dtype, device);
      inputs[0].mul_(3);
      std::vector<at::Tensor> leaves;
      for (int i = 0; i < 3; ++i) leaves.push_back(with_grad(inputs[i].to(at::kCPU, at::kFloat)));
      const at::Tensor expected = attention(leaves[0], leaves[1], leaves[2], layout, 0.125);
      expected.backward(inputs[3].to(at::kCPU, at::kFloat));
      for (const int64_t cp : {2, 3}) {
        SCOPED_TRACE(name_of(c, cp));
        const std::vector<at::Tensor> results = on_ranks(cp, inputs, layout, 0.125, false);
        // By norm: bf16 rounds single elements of sums over so many keys further off.
        const auto difference = [](const at::Tensor& a, const at::Tensor& b) {
          return ((a.cpu().to(at::kFloat) - b).norm() / b.norm()).item<double>();
        };
        const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-2;
        EXPECT_LE(difference(results[0], expected), tolerance) << "out";
        for (int i = 0; i < 3; ++i)
          EXPECT_LE(difference(results[i + 1], leaves[i].grad()), tolerance) << "gradient " << i;
      }
    }
  }
}

TEST(ContextAttention, SinksMatchOneRank) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for_cases([&](const Case& c, int64_t cp) {
        if (!offered(c, cp, dtype, device, false)) return;
        SCOPED_TRACE(fmt::format("{} {}", c10::toString(dtype), device.str()));
        const double scale = 1.0 / std::sqrt(static_cast<double>(c.size));
        const std::vector<at::Tensor> inputs = random_inputs(c, dtype, device);
        const Parameter sinks = make_parameter(random_tensor({c.q_heads}, dtype, device, 5), "sinks");
        const Parameter whole = make_parameter(sinks.value.to(at::kCPU, at::kFloat), "sinks");
        std::vector<at::Tensor> leaves;
        for (int i = 0; i < 3; ++i) leaves.push_back(with_grad(inputs[i].to(at::kCPU, at::kFloat)));
        const at::Tensor expected = attention(leaves[0], leaves[1], leaves[2], c.layout, scale, false, whole);
        expected.backward(inputs[3].to(at::kCPU, at::kFloat));

        const std::vector<at::Tensor> results = on_ranks(cp, inputs, c.layout, scale, false, sinks);
        const double tolerance = dtype == at::kFloat ? 1e-5 : 1.5e-2;
        EXPECT_TRUE(tensors_close(results[0], expected, tolerance, tolerance)) << "out";
        EXPECT_TRUE(tensors_close(results[1], leaves[0].grad(), 2 * tolerance, 2 * tolerance)) << "dq";
        EXPECT_TRUE(tensors_close(results[2], leaves[1].grad(), 2 * tolerance, 3 * tolerance)) << "dk";
        EXPECT_TRUE(tensors_close(results[3], leaves[2].grad(), 2 * tolerance, 3 * tolerance)) << "dv";
        EXPECT_TRUE(tensors_close(sinks.grad, whole.grad, 2 * tolerance, 6 * tolerance)) << "d_sinks";
      });
    }
  }
}

TEST(ContextAttention, RepeatsToTheBit) {
  for (const at::Device device : test_devices()) {
    const at::ScalarType dtype = device.is_cpu() ? at::kFloat : at::kBFloat16;
    const Case c{{2, 192, {}, 0}, 4, 2, 64, 64};
    const std::vector<at::Tensor> inputs = random_inputs(c, dtype, device);
    const std::vector<at::Tensor> once = on_ranks(4, inputs, c.layout, 0.125, true);
    for (int repeat = 0; repeat < 3; ++repeat) {
      const std::vector<at::Tensor> again = on_ranks(4, inputs, c.layout, 0.125, true);
      for (size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(tensors_identical(again[i], once[i]));
    }
  }
}

// Case A4: a token reaches later outputs of its own document alone, to the bit, on whatever rank they are.
TEST(ContextAttention, ATokenReachesOnlyItsOwnDocument) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const AttentionLayout layout{2, 64, {0, 1, 8, 39, 64, 64, 80, 96, 112, 128}, 0};
      const std::vector<at::Tensor> inputs = random_inputs({layout, 4, 2, 16, 16}, dtype, device);
      const at::Tensor before = on_ranks(2, inputs, layout, 0.25, false)[0];
      for (const auto& [token, end] :
           {std::pair<int64_t, int64_t>{0, 1}, {3, 8}, {8, 39}, {39, 64}, {63, 64}, {64, 80}, {80, 96}}) {
        std::vector<at::Tensor> changed = inputs;
        for (int i = 0; i < 3; ++i) {
          changed[i] = inputs[i].clone();
          changed[i].select(0, token).add_(1.0);
        }
        const at::Tensor after = on_ranks(2, changed, layout, 0.25, false)[0];
        const at::Tensor differs = after.ne(before).flatten(1).any(1).cpu();
        for (int64_t t = 0; t < 128; ++t) {
          EXPECT_EQ(differs[t].item<bool>(), t >= token && t < end) << "token " << token << " reached " << t;
        }
      }
    }
  }
}

TEST(ContextAttention, ZigzagPositions) {
  EXPECT_EQ(zigzag_positions(8, 2, 0), (std::vector<int64_t>{0, 1, 6, 7}));
  EXPECT_EQ(zigzag_positions(8, 2, 1), (std::vector<int64_t>{2, 3, 4, 5}));
  EXPECT_EQ(zigzag_positions(4, 1, 0), (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_THROW(zigzag_positions(10, 2, 0), Error);
}

// Global row i sees global row j.
bool visible(const AttentionLayout& layout, int64_t i, int64_t j) {
  if (j > i || j / layout.seq_len != i / layout.seq_len) return false;
  if (layout.window > 0 && i - j >= layout.window) return false;
  for (const int64_t offset : layout.document_offsets) {
    if (j < offset && offset <= i) return false;
  }
  return true;
}

// Adds one to each (query row, key row) that the block's kernel call covers.
void cover(const RingBlock& block, int64_t rows, std::vector<int64_t>& seen, int64_t tokens) {
  const auto mark = [&](int64_t q0, int64_t queries, int64_t k0, int64_t keys) {
    EXPECT_TRUE(!block.causal || queries == keys);
    for (int64_t i = 0; i < queries; ++i) {
      int64_t count = 0;
      for (int64_t j = 0; j < keys; ++j) {
        if (block.causal && j > i) continue;
        if (block.left >= 0 && j < i + keys - queries - block.left) continue;
        seen[(q0 + i) * tokens + k0 + j] += 1;
        ++count;
      }
      EXPECT_GT(count, 0) << "a kernel's row without a key has no log-sum-exp";
    }
  };
  for (size_t i = 1; i < block.pieces.size(); ++i) {
    const int64_t first = block.pieces[i - 1], size = block.pieces[i] - first;
    mark(first, size, first, size);
  }
  if (!block.pieces.empty()) return;
  for (int64_t s = block.sequence; s < block.sequence + block.sequences; ++s) {
    mark(s * rows + block.q_first, block.queries, s * rows + block.k_first, block.keys);
  }
}

// What the CPU's and the GPU's kernels are asked for is the mask, each pair once.
TEST(ContextAttention, StepsCoverTheMaskOnce) {
  for_cases([](const Case& c, int64_t cp) {
    const AttentionLayout& layout = c.layout;
    const int64_t rows = layout.seq_len / cp, tokens = rows * layout.sequences;
    const bool masked = !layout.document_offsets.empty() || layout.window > 0;
    for (int64_t rank = 0; rank < cp; ++rank) {
      const at::Tensor own = rows_of(layout, cp, rank);
      for (int64_t peer = 0; peer < cp; ++peer) {
        const at::Tensor theirs = rows_of(layout, cp, peer);
        const RowAttention ranges = ring_rows(layout, cp, rank, peer, 1.0);
        const std::vector<RingBlock> blocks = ring_blocks(layout, cp, rank, peer);
        EXPECT_TRUE(masked || blocks.size() == 1);
        std::vector<int64_t> seen(tokens * tokens);
        for (const RingBlock& block : blocks) cover(block, rows, seen, tokens);
        int64_t wrong_ranges = 0, wrong_blocks = 0;
        for (int64_t i = 0; i < tokens; ++i) {
          for (int64_t j = 0; j < tokens; ++j) {
            const bool sees = visible(layout, own.data_ptr<int64_t>()[i], theirs.data_ptr<int64_t>()[j]);
            wrong_ranges += sees != (ranges.first_key[i] <= j && j < ranges.end_key[i]);
            wrong_blocks += (sees ? 1 : 0) != seen[i * tokens + j];
          }
        }
        EXPECT_EQ(wrong_ranges, 0) << "rank " << rank << " asks " << peer;
        EXPECT_EQ(wrong_blocks, 0) << "rank " << rank << " asks " << peer;
      }
    }
  });
}

TEST(ContextAttention, WrongSizesAreRefused) {
  test::run_ranks(2, [](Communicator& ring) {
    const at::Tensor q = at::zeros({5, 2, 4});
    EXPECT_THROW(context_attention(q, q, q, {1, 10, {}, 0}, 1.0, false, &ring), Error);
    EXPECT_THROW(context_attention(q, q, q, {1, 5, {}, 0}, 1.0, false, &ring), Error);
  });
}

}  // namespace
}  // namespace marrow
