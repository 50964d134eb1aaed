#include "ops/gated_delta_rule.h"

#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

struct Case {
  std::vector<int32_t> starts;
  int64_t key_heads, value_heads, key_size, value_size;
  bool initial;
  double decay = 0.5;  // g = −|normal| · decay
};

struct Leaves {
  Tensor q, k, v, g, beta, initial;
  std::vector<Tensor> all() const { return {q, k, v, g, beta, initial}; }
};

Tensor leaf_of(const Tensor& tensor, at::ScalarType dtype) { return with_grad(tensor.to(dtype)); }

// beta is between 0 and 1, both included; g has zeros.
Leaves make_leaves(const Case& c, at::ScalarType dtype, at::Device device) {
  const int64_t tokens = c.starts.back(), segments = static_cast<int64_t>(c.starts.size()) - 1;
  const auto random = [&](at::IntArrayRef sizes, int64_t seed) {
    return random_tensor(sizes, at::kFloat, device, seed);
  };
  Leaves x;
  x.q = leaf_of(random({tokens, c.key_heads, c.key_size}, 1), dtype);
  x.k = leaf_of(random({tokens, c.key_heads, c.key_size}, 2), dtype);
  x.v = leaf_of(random({tokens, c.value_heads, c.value_size}, 3), dtype);
  x.g = with_grad(random({tokens, c.value_heads}, 4).clamp_max(0.5).sub(0.5).mul(c.decay));
  x.beta = with_grad(random({tokens, c.value_heads}, 5).mul(0.7).add(0.5).clamp(0.0, 1.0));
  if (c.initial) x.initial = with_grad(random({segments, c.value_heads, c.key_size, c.value_size}, 6));
  return x;
}

GatedDeltaRule run(const Leaves& x, const std::vector<int32_t>& starts) {
  return gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, at::tensor(starts, at::kInt).to(x.q.device()), x.initial);
}

// The recurrence, a token at a time, in the inputs' fp64.
GatedDeltaRule plain(const Leaves& x, const std::vector<int32_t>& starts) {
  const int64_t group = x.v.size(1) / x.q.size(1);
  const auto unit = [&](const Tensor& t) {
    return (t / (t.square().sum(-1, true) + 1e-6).sqrt()).repeat_interleave(group, 1);
  };
  const Tensor q = unit(x.q) / std::sqrt(static_cast<double>(x.q.size(2))), k = unit(x.k);
  std::vector<Tensor> outs{at::zeros({0, x.v.size(1), x.v.size(2)}, x.v.options())}, states;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    Tensor state = x.initial.defined()
                       ? x.initial[static_cast<int64_t>(i)]
                       : at::zeros({x.v.size(1), x.q.size(2), x.v.size(2)}, x.v.options());  // [Hv, Dk, Dv]
    for (int64_t t = starts[i]; t < starts[i + 1]; ++t) {
      state = state * x.g[t].exp().unsqueeze(-1).unsqueeze(-1);
      const Tensor old = at::matmul(k[t].unsqueeze(1), state).squeeze(1);
      const Tensor change = x.beta[t].unsqueeze(-1) * (x.v[t] - old);
      state = state + k[t].unsqueeze(2) * change.unsqueeze(1);
      outs.push_back(at::matmul(q[t].unsqueeze(1), state).transpose(0, 1));
    }
    states.push_back(state);
  }
  return {at::cat(outs), at::stack(states)};
}

// Both outputs' gradients.
void backward_of(const GatedDeltaRule& y, at::ScalarType dtype) {
  const Tensor d_out = random_tensor(y.out.sizes(), dtype, y.out.device(), 7).to(y.out.scalar_type());
  const Tensor d_state = random_tensor(y.state.sizes(), at::kFloat, y.state.device(), 8).to(y.state.scalar_type());
  ((y.out * d_out).sum(at::kDouble) + (y.state * d_state).sum(at::kDouble)).backward();
}

TEST(GatedDeltaRule, MatchesTheRecurrence) {
  const Case cases[] = {
      {{0, 0}, 1, 1, 8, 8, true},
      {{0, 1}, 1, 1, 8, 8, false},
      {{0, 64}, 1, 2, 16, 8, false},
      {{0, 63, 63, 128, 193}, 2, 4, 8, 24, true},
      {{0, 5, 6, 7, 7, 70, 71, 200}, 2, 2, 32, 64, true, 0.01},
      {{0, 150}, 3, 3, 24, 40, true, 50.0},
      {{0, 130}, 1, 3, 64, 32, false, 1e-6},
      {{0, 65, 131}, 1, 2, 128, 128, true, 0.1},
      {{0, 3, 700}, 1, 2, 64, 64, false, 0.05},
  };
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const Case& c : cases) {
        SCOPED_TRACE(fmt::format("{} segments, {} tokens, heads {} {}, sizes {} {}, decay {}, {} {}",
                                 c.starts.size() - 1, c.starts.back(), c.key_heads, c.value_heads, c.key_size,
                                 c.value_size, c.decay, c10::toString(dtype), device.str()));
        const Leaves x = make_leaves(c, dtype, device);
        const GatedDeltaRule y = run(x, c.starts);
        backward_of(y, dtype);
        Leaves reference{reference_leaf(x.q), reference_leaf(x.k),    reference_leaf(x.v),
                         reference_leaf(x.g), reference_leaf(x.beta), {}};
        if (c.initial) reference.initial = reference_leaf(x.initial);
        const GatedDeltaRule expected = plain(reference, c.starts);
        backward_of(expected, dtype);

        EXPECT_EQ(y.out.scalar_type(), dtype);
        // On a GPU bf16 inputs are multiplied as such, in between too; gradients of g are sums of many of them.
        const double out = dtype == at::kFloat ? 1e-5 : 1e-2;
        EXPECT_TRUE(tensors_close(y.out, expected.out, out, out));
        const bool rounds = dtype == at::kBFloat16 && device.is_cuda();
        const double relative = rounds ? 2e-2 : dtype == at::kFloat ? 2e-5 : 1e-2;
        EXPECT_TRUE(tensors_close(y.state, expected.state, rounds ? 2e-2 : 2e-5, rounds ? 2e-2 : 2e-5));
        const char* names[] = {"q", "k", "v", "g", "beta", "initial"};
        for (size_t i = 0; i < 6; ++i) {
          if (!x.all()[i].defined()) continue;
          SCOPED_TRACE(names[i]);
          ASSERT_TRUE(x.all()[i].grad().defined());
          const Tensor want = reference.all()[i].grad();
          if (!want.defined()) continue;  // of no tokens
          const double largest = std::max(1.0, want.abs().max().item<double>());
          EXPECT_TRUE(tensors_close(x.all()[i].grad(), want, relative, relative * largest));
        }
      }
    }
  }
}

// Where a state forgets at once, the gradient of its decay is tiny; an optimizer that divides by its size wants it
// right.
TEST(GatedDeltaRule, GradientOfAStrongDecayIsNotRounding) {
  const std::vector<int32_t> starts{0, 150};
  for (const at::Device device : test_devices()) {
    SCOPED_TRACE(device.str());
    Leaves x = make_leaves({starts, 2, 4, 16, 24, false}, at::kFloat, device);
    x.g = with_grad(x.g.detach().mul(0.5).sub(9));
    Leaves reference{reference_leaf(x.q), reference_leaf(x.k),    reference_leaf(x.v),
                     reference_leaf(x.g), reference_leaf(x.beta), {}};
    const Tensor d_out = random_tensor(x.v.sizes(), at::kFloat, device, 7);
    run(x, starts).out.backward(d_out);
    plain(reference, starts).out.backward(d_out.to(at::kCPU, at::kDouble));
    const Tensor want = reference.g.grad();
    EXPECT_LT(want.norm().item<double>(), 1e-2);
    EXPECT_LT((x.g.grad().cpu() - want).norm().item<double>(), 1e-5 * want.norm().item<double>());
  }
}

Leaves rows_of(const Leaves& x, int64_t from, int64_t to) {
  const auto part = [&](const Tensor& t) { return t.detach().slice(0, from, to); };
  return {part(x.q), part(x.k), part(x.v), part(x.g), part(x.beta), {}};
}

TEST(GatedDeltaRule, StateOfOnePartStartsTheNext) {
  for (const at::Device device : test_devices()) {
    const Leaves x = make_leaves({{0, 150}, 2, 4, 16, 32, false}, at::kFloat, device);
    const GatedDeltaRule whole = run(rows_of(x, 0, 150), {0, 150});
    for (const int32_t cut : {1, 64, 77, 149}) {
      const GatedDeltaRule first = run(rows_of(x, 0, cut), {0, cut});
      Leaves rest = rows_of(x, cut, 150);
      rest.initial = first.state;
      const GatedDeltaRule second = run(rest, {0, 150 - cut});
      EXPECT_TRUE(tensors_close(at::cat({first.out, second.out}), whole.out, 1e-5, 1e-5));
      EXPECT_TRUE(tensors_close(second.state, whole.state, 1e-5, 1e-5));
    }
  }
}

// A part's state is its transition times the state before it, plus its own from zero: what context parallelism uses.
TEST(GatedDeltaRule, TransitionIsTheStateOfTheIdentity) {
  for (const at::Device device : test_devices()) {
    const int64_t size = 24;
    const Leaves x = make_leaves({{0, 70}, 1, 2, size, size, true}, at::kFloat, device);
    Leaves part = rows_of(x, 0, 70);
    const Tensor alone = run(part, {0, 70}).state;
    part.initial = x.initial.detach();
    const Tensor expected = run(part, {0, 70}).state;
    part.q = at::zeros_like(part.q);
    part.v = at::zeros_like(part.v);
    part.initial = at::eye(size, x.initial.options().requires_grad(false)).expand({1, 2, size, size});
    const Tensor transition = run(part, {0, 70}).state;
    EXPECT_TRUE(tensors_close(at::matmul(transition, x.initial) + alone, expected, 1e-5, 1e-5));
  }
}

TEST(GatedDeltaRule, OneOutputAloneHasGradientsAndRepeatsToTheBit) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      std::vector<Tensor> once;
      for (int repeat = 0; repeat < 3; ++repeat) {
        const Leaves x = make_leaves({{0, 99, 200}, 2, 4, 32, 32, true}, dtype, device);
        const GatedDeltaRule y = run(x, {0, 99, 200});
        repeat < 2 ? y.out.sum().backward() : y.state.sum().backward();
        if (repeat == 2) {
          EXPECT_TRUE(tensors_identical(x.q.grad(), at::zeros_like(x.q)));
          EXPECT_GT(x.k.grad().abs().sum().item<double>(), 0.0);
          continue;
        }
        for (const Tensor& leaf : x.all()) {
          if (repeat == 0) once.push_back(leaf.grad());
        }
        for (size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(tensors_identical(x.all()[i].grad(), once[i]));
      }
    }
  }
}

TEST(GatedDeltaRule, TakesColumnRanges) {
  for (const at::Device device : test_devices()) {
    const Tensor wide = with_grad(random_tensor({70, 4 * 16}, at::kFloat, device, 1));
    const Tensor g = at::zeros({70, 2}, at::device(device)), beta = at::ones({70, 2}, at::device(device));
    const Tensor starts = at::tensor({0, 70}, at::kInt).to(device);
    const auto parts = wide.split_with_sizes({16, 16, 32}, 1);
    const auto heads = [](const Tensor& x) { return x.unflatten(1, {-1, 16}); };
    const auto y = gated_delta_rule(heads(parts[0]), heads(parts[1]), heads(parts[2]), g, beta, starts);
    y.out.sum().backward();
    const auto dense = [&](int64_t i) { return with_grad(heads(parts[i])); };
    const Tensor q = dense(0), k = dense(1), v = dense(2);
    const auto expected = gated_delta_rule(q, k, v, g, beta, starts);
    expected.out.sum().backward();
    EXPECT_TRUE(tensors_identical(y.out, expected.out));
    EXPECT_TRUE(
        tensors_identical(wide.grad(), at::cat({q.grad().flatten(1), k.grad().flatten(1), v.grad().flatten(1)}, 1)));
  }
}

TEST(GatedDeltaRule, RefusesWhatDoesNotFit) {
  const Tensor q = at::ones({4, 2, 8}), v = at::ones({4, 3, 8}), g = at::zeros({4, 3}), g2 = at::zeros({4, 2});
  const Tensor starts = at::tensor({0, 4}, at::kInt);
  EXPECT_THROW(gated_delta_rule(q, q, v, g, g, starts), Error);  // 3 value heads for 2 key heads
  EXPECT_THROW(gated_delta_rule(q, q, q, g, g, starts), Error);  // g
  EXPECT_THROW(gated_delta_rule(q, q, q, g2, g2, at::tensor({0, 5}, at::kInt)), Error);
  EXPECT_THROW(gated_delta_rule(q, q, q, g2, g2, at::tensor({0, 3, 2, 4}, at::kInt)), Error);
  EXPECT_THROW(gated_delta_rule(q, q, q, g2, g2, at::tensor({1, 4}, at::kInt)), Error);
  EXPECT_THROW(gated_delta_rule(q, q, q, g2, g2, starts, at::zeros({2, 2, 8, 8})), Error);
  EXPECT_NO_THROW(gated_delta_rule(q, q, q, g2, g2, starts));
}

}  // namespace
}  // namespace marrow
