#include "ops/pch.h"
// After the precompiled header:
#include "ops/attention.h"
#include "ops/op_test_support.h"

namespace marrow {
namespace {

// One row and head at a time: row i sees keys [max(document start, i − window + 1), i], and the head's sink, if any, in
// a column that is dropped afterwards.
at::Tensor plain_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionLayout& layout,
                           double scale, const at::Tensor& sinks = {}) {
  std::vector<int64_t> starts(q.size(0));
  for (int64_t t = 0; t < q.size(0); ++t) {
    starts[t] = t / layout.seq_len * layout.seq_len;
    for (const int64_t offset : layout.document_offsets) {
      if (offset <= t) starts[t] = std::max(starts[t], offset);
    }
  }
  const int64_t group = q.size(1) / k.size(1);
  std::vector<at::Tensor> rows;
  for (int64_t t = 0; t < q.size(0); ++t) {
    int64_t first = starts[t];
    if (layout.window > 0) first = std::max(first, t - layout.window + 1);
    std::vector<at::Tensor> heads;
    for (int64_t h = 0; h < q.size(1); ++h) {
      const at::Tensor keys = k.slice(0, first, t + 1).select(1, h / group);
      const at::Tensor values = v.slice(0, first, t + 1).select(1, h / group);
      at::Tensor scores = keys.mv(q.select(0, t).select(0, h)).mul(scale);
      if (sinks.defined()) scores = at::cat({scores, sinks.narrow(0, h, 1)});
      heads.push_back(values.t().mv(scores.softmax(0).narrow(0, 0, keys.size(0))));
    }
    rows.push_back(at::stack(heads));
  }
  return at::stack(rows);
}

struct Case {
  AttentionLayout layout;
  int64_t q_heads, kv_heads, size, value_size;
};

std::vector<Case> cases() {
  return {
      {{1, 1, {}, 0}, 1, 1, 8, 8},
      {{1, 37, {}, 0}, 4, 2, 16, 16},
      {{3, 64, {}, 0}, 4, 4, 64, 64},
      {{2, 149, {}, 0}, 8, 1, 8, 8},
      {{2, 40, {}, 0}, 2, 2, 24, 16},  // as MLA: value heads of another size
      {{1, 70, {0, 9, 70}, 0}, 2, 2, 192, 128},
      {{1, 64, {0, 1, 8, 39, 64}, 0}, 4, 2, 16, 16},
      {{2, 64, {0, 16, 32, 48, 64, 64, 80, 128}, 0}, 4, 2, 64, 64},
      {{1, 150, {}, 1}, 2, 1, 8, 8},
      {{2, 150, {}, 33}, 4, 2, 16, 16},
      {{1, 200, {0, 3, 150, 200}, 64}, 6, 2, 32, 32},
      {{1, 50, {}, 500}, 2, 1, 16, 16},
  };
}

std::string name_of(const Case& c, at::ScalarType dtype, at::Device device) {
  return fmt::format("{} × {} tokens, {} document offsets, window {}, {}/{} heads of {} and {}, {} {}",
                     c.layout.sequences, c.layout.seq_len, c.layout.document_offsets.size(), c.layout.window, c.q_heads,
                     c.kv_heads, c.size, c.value_size, c10::toString(dtype), device.str());
}

// bf16 on the GPU runs library kernels that ask for head sizes of 8·n.
bool offered(const Case& c, at::ScalarType dtype, at::Device device) {
  if (device.is_cpu() || dtype == at::kFloat) return true;
  return c.size % 8 == 0 && c.value_size % 8 == 0;
}

TEST(Attention, MatchesRowByRow) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const Case& c : cases()) {
        if (!offered(c, dtype, device)) continue;
        for (const bool deterministic : {false, true}) {
          SCOPED_TRACE(name_of(c, dtype, device));
          const int64_t tokens = c.layout.sequences * c.layout.seq_len;
          const double scale = 1.0 / std::sqrt(static_cast<double>(c.size));
          const at::Tensor q = with_grad(random_tensor({tokens, c.q_heads, c.size}, dtype, device, 1));
          const at::Tensor k = with_grad(random_tensor({tokens, c.kv_heads, c.size}, dtype, device, 2));
          const at::Tensor v = with_grad(random_tensor({tokens, c.kv_heads, c.value_size}, dtype, device, 3));
          const at::Tensor d = random_tensor({tokens, c.q_heads, c.value_size}, dtype, device, 4);
          const at::Tensor out = attention(q, k, v, c.layout, scale, deterministic);
          EXPECT_EQ(out.scalar_type(), dtype);
          EXPECT_TRUE(out.is_contiguous());
          out.backward(d);

          const at::Tensor rq = reference_leaf(q), rk = reference_leaf(k), rv = reference_leaf(v);
          const at::Tensor reference = plain_attention(rq, rk, rv, c.layout, scale);
          reference.backward(d.to(at::kCPU, at::kDouble));
          const double tolerance = dtype == at::kFloat ? 1e-5 : 1.5e-2;
          EXPECT_TRUE(tensors_close(out, reference, tolerance, tolerance));
          EXPECT_TRUE(tensors_close(q.grad(), rq.grad(), 2 * tolerance, 2 * tolerance));
          EXPECT_TRUE(tensors_close(k.grad(), rk.grad(), 2 * tolerance, 3 * tolerance));
          EXPECT_TRUE(tensors_close(v.grad(), rv.grad(), 2 * tolerance, 3 * tolerance));
        }
      }
    }
  }
}

// Case A4: a token changes its own document's later outputs alone, to the bit.
TEST(Attention, ATokenReachesOnlyItsOwnDocument) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const AttentionLayout layout{2, 64, {0, 1, 8, 39, 64, 80, 96, 112, 128}, 0};
      const at::Tensor q = random_tensor({128, 4, 16}, dtype, device, 1);
      at::Tensor k = random_tensor({128, 2, 16}, dtype, device, 2);
      at::Tensor v = random_tensor({128, 2, 16}, dtype, device, 3);
      const at::Tensor before = attention(q, k, v, layout, 0.25);
      for (const auto& [token, end] : {std::pair<int64_t, int64_t>{0, 1}, {3, 8}, {38, 39}, {63, 64}, {80, 96}}) {
        at::Tensor other_k = k.clone();
        at::Tensor other_v = v.clone();
        other_k.select(0, token).add_(1.0);
        other_v.select(0, token).add_(1.0);
        const at::Tensor after = attention(q, other_k, other_v, layout, 0.25);
        const at::Tensor changed = after.ne(before).flatten(1).any(1).cpu();
        for (int64_t t = 0; t < 128; ++t) {
          EXPECT_EQ(changed[t].item<bool>(), t >= token && t < end) << "token " << token << " reached " << t;
        }
      }
    }
  }
}

TEST(Attention, StridedInputs) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const AttentionLayout layout{2, 21, {}, 0};
      const at::Tensor packed = random_tensor({42, 8, 16}, dtype, device, 1);  // q, k, v heads
      const at::Tensor q = packed.narrow(1, 0, 4);
      const at::Tensor k = packed.narrow(1, 4, 2);
      const at::Tensor v = packed.narrow(1, 6, 2);
      const at::Tensor dense = attention(q.contiguous(), k.contiguous(), v.contiguous(), layout, 0.25);
      EXPECT_TRUE(tensors_identical(attention(q, k, v, layout, 0.25), dense));
      const at::Tensor by_size = q.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
      EXPECT_TRUE(tensors_identical(attention(by_size, k, v, layout, 0.25), dense));
      const at::Tensor leaf = with_grad(packed);
      const at::Tensor out = attention(leaf.narrow(1, 0, 4), leaf.narrow(1, 4, 2), leaf.narrow(1, 6, 2), layout, 0.25);
      out.permute({2, 0, 1}).contiguous().sum().backward();
      EXPECT_TRUE(leaf.grad().isfinite().all().item<bool>());
      const at::NoGradGuard guard;
      EXPECT_FALSE(attention(leaf.narrow(1, 0, 4), k, v, layout, 0.25).requires_grad());
    }
  }
}

TEST(Attention, DeterministicRepeatsToTheBit) {
  for (const at::Device device : test_devices()) {
    const at::ScalarType dtype = device.is_cpu() ? at::kFloat : at::kBFloat16;
    const AttentionLayout layout{2, 300, {}, 0};
    const at::Tensor q = with_grad(random_tensor({600, 4, 64}, dtype, device, 1));
    const at::Tensor k = with_grad(random_tensor({600, 2, 64}, dtype, device, 2));
    const at::Tensor v = with_grad(random_tensor({600, 2, 64}, dtype, device, 3));
    std::vector<at::Tensor> once;
    for (int repeat = 0; repeat < 5; ++repeat) {
      for (const at::Tensor& leaf : {q, k, v}) leaf.mutable_grad() = at::Tensor();
      attention(q, k, v, layout, 0.125, true).pow(2).sum().backward();
      if (repeat == 0) once = {q.grad(), k.grad(), v.grad()};
      EXPECT_TRUE(tensors_identical(q.grad(), once[0]));
      EXPECT_TRUE(tensors_identical(k.grad(), once[1]));
      EXPECT_TRUE(tensors_identical(v.grad(), once[2]));
    }
  }
}

// Case A2: one key, q = k = 1, v = 2, a sink of 0.
TEST(Attention, ASinkOfOneKey) {
  for (const at::Device device : test_devices()) {
    const auto value = [&](double x) { return at::full({1, 1, 1}, x, at::device(device).dtype(at::kFloat)); };
    const at::Tensor q = with_grad(value(1)), k = with_grad(value(1)), v = with_grad(value(2));
    const Parameter sinks = make_parameter(value(0).flatten(), "sinks");
    const at::Tensor out = attention(q, k, v, {1, 1, {}, 0}, 1.0, false, sinks);
    out.backward(value(1));
    EXPECT_NEAR(out.item<double>(), 1.462117, 1e-6);
    EXPECT_NEAR(q.grad().item<double>(), 0.393224, 1e-6);
    EXPECT_NEAR(k.grad().item<double>(), 0.393224, 1e-6);
    EXPECT_NEAR(v.grad().item<double>(), 0.731059, 1e-6);
    EXPECT_NEAR(sinks.grad.item<double>(), -0.393224, 1e-6);
  }
}

TEST(Attention, SinksMatchAColumnThatIsDropped) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const Case& c : cases()) {
        if (!offered(c, dtype, device)) continue;
        SCOPED_TRACE(name_of(c, dtype, device));
        const int64_t tokens = c.layout.sequences * c.layout.seq_len;
        const double scale = 1.0 / std::sqrt(static_cast<double>(c.size));
        const at::Tensor q = with_grad(random_tensor({tokens, c.q_heads, c.size}, dtype, device, 1));
        const at::Tensor k = with_grad(random_tensor({tokens, c.kv_heads, c.size}, dtype, device, 2));
        const at::Tensor v = with_grad(random_tensor({tokens, c.kv_heads, c.value_size}, dtype, device, 3));
        const at::Tensor d = random_tensor({tokens, c.q_heads, c.value_size}, dtype, device, 4);
        const Parameter sinks = make_parameter(random_tensor({c.q_heads}, dtype, device, 5), "sinks");
        sinks.grad.fill_(0.5);
        const at::Tensor out = attention(q, k, v, c.layout, scale, false, sinks);
        EXPECT_TRUE(
            tensors_identical(attention(q.detach(), k.detach(), v.detach(), c.layout, scale, false, sinks), out));
        out.backward(d);

        const at::Tensor rq = reference_leaf(q), rk = reference_leaf(k), rv = reference_leaf(v);
        const at::Tensor rs = reference_leaf(sinks.value);
        const at::Tensor reference = plain_attention(rq, rk, rv, c.layout, scale, rs);
        reference.backward(d.to(at::kCPU, at::kDouble));
        const double tolerance = dtype == at::kFloat ? 1e-5 : 1.5e-2;
        EXPECT_TRUE(tensors_close(out, reference, tolerance, tolerance));
        EXPECT_TRUE(tensors_close(q.grad(), rq.grad(), 2 * tolerance, 2 * tolerance));
        EXPECT_TRUE(tensors_close(k.grad(), rk.grad(), 2 * tolerance, 3 * tolerance));
        EXPECT_TRUE(tensors_close(v.grad(), rv.grad(), 2 * tolerance, 3 * tolerance));
        EXPECT_TRUE(tensors_close(sinks.grad - 0.5, rs.grad(), 2 * tolerance, 4 * tolerance));
      }
    }
  }
}

TEST(Attention, LargeScoresStayFinite) {
  const at::Tensor q = with_grad(at::full({9, 1, 8}, 100.0));
  const at::Tensor k = with_grad(at::full({9, 1, 8}, 100.0));
  const at::Tensor v = with_grad(random_tensor({9, 1, 8}, at::kFloat, at::kCPU, 1));
  const at::Tensor out = attention(q, k, v, {1, 9, {}, 0}, 1.0);  // every score 80,000
  out.sum().backward();
  EXPECT_TRUE(tensors_close(out[8].flatten(), v.detach().mean(0).flatten(), 1e-5, 1e-5));
  EXPECT_TRUE(q.grad().isfinite().all().item<bool>());
}

TEST(Attention, NoTokens) {
  for (const at::Device device : test_devices()) {
    const at::Tensor q = with_grad(at::zeros({0, 4, 16}, device));
    const at::Tensor kv = at::zeros({0, 2, 16}, device);
    const at::Tensor out = attention(q, kv, kv, {0, 32, {}, 0}, 1.0);
    EXPECT_EQ(out.sizes(), at::IntArrayRef({0, 4, 16}));
    out.sum().backward();
    EXPECT_EQ(q.grad().sizes(), q.sizes());
  }
}

TEST(Attention, WrongLayoutsAreRefused) {
  const at::Tensor q = at::zeros({8, 2, 4});
  const auto refused = [&](const AttentionLayout& layout, std::string_view what) {
    try {
      attention(q, q, q, layout, 1.0);
      ADD_FAILURE() << "accepted: " << what;
    } catch (const Error& error) {
      EXPECT_NE(error.report().what.find(what), std::string::npos) << error.report().what;
      EXPECT_FALSE(error.report().fix.empty());
    }
  };
  refused({1, 7, {}, 0}, "8 tokens, layout of 1 sequences of 7");
  refused({1, 8, {0, 9}, 0}, "from 0 to 9 for 8 tokens");
  refused({1, 8, {0, 5, 3, 8}, 0}, "not ascending");
  refused({2, 4, {0, 3, 8}, 0}, "no document starts at token 4");
}

}  // namespace
}  // namespace marrow
