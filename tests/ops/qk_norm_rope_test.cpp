#include "ops/pch.h"
// After the precompiled header:
#include "ops/op_test_support.h"
#include "ops/qk_norm_rope.h"

namespace marrow {
namespace {

constexpr double kEps = 1e-6;

struct Shape {
  int64_t tokens, q_heads, kv_heads, size;
};

// As transformers writes it: norm each head, then x · cos + rotate_half(x) · sin.
at::Tensor plain_head(const at::Tensor& x, const at::Tensor& norm, const at::Tensor& cos, const at::Tensor& sin) {
  const at::Tensor normed = x * (x.pow(2).mean(-1, true) + kEps).rsqrt() * norm;
  const auto halves = normed.chunk(2, -1);
  const at::Tensor rotated = at::cat({-halves[1], halves[0]}, -1);
  const at::Tensor c = at::cat({cos, cos}, -1).unsqueeze(1);
  const at::Tensor s = at::cat({sin, sin}, -1).unsqueeze(1);
  return normed * c + rotated * s;
}

at::Tensor some_positions(int64_t tokens, at::Device device) {
  return at::arange(tokens, at::kInt).mul(7).remainder(50).to(at::kInt).to(device);
}

TEST(QkNormRope, MatchesPlainComposition) {
  const Shape shapes[] = {{0, 2, 1, 8},    {1, 1, 1, 2},    {5, 4, 2, 16},  {19, 3, 3, 6},   {33, 5, 2, 64},
                          {301, 4, 1, 32}, {67, 8, 2, 128}, {9, 2, 1, 256}, {13, 2, 2, 130}, {6, 1, 1, 96}};
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [tokens, q_heads, kv_heads, size] : shapes) {
        SCOPED_TRACE(fmt::format("{} tokens, {} and {} heads of {} {} {}", tokens, q_heads, kv_heads, size,
                                 c10::toString(dtype), device.str()));
        const at::Tensor qkv = with_grad(random_tensor({tokens, (q_heads + 2 * kv_heads) * size}, dtype, device, 1));
        const Parameter q_norm = make_parameter(random_tensor({size}, dtype, device, 2), "q_norm");
        const Parameter k_norm = make_parameter(random_tensor({size}, dtype, device, 3), "k_norm");
        const RopeTable table = make_rope_table(rope_inverse_frequencies(1e4, size), 50, 1.0, device);
        const at::Tensor positions = some_positions(tokens, device);
        const auto [q, k, v] = qk_norm_rope(qkv, q_norm, k_norm, table, positions, q_heads, kv_heads, kEps);
        const at::Tensor dq = random_tensor({tokens, q_heads, size}, dtype, device, 4);
        const at::Tensor dk = random_tensor({tokens, kv_heads, size}, dtype, device, 5);
        const at::Tensor dv = random_tensor({tokens, kv_heads, size}, dtype, device, 6);
        ((q * dq).sum(at::kDouble) + (k * dk).sum(at::kDouble) + (v * dv).sum(at::kDouble)).backward();

        const at::Tensor x = reference_leaf(qkv);
        const at::Tensor rq_norm = reference_leaf(q_norm.value);
        const at::Tensor rk_norm = reference_leaf(k_norm.value);
        const auto heads =
            x.unflatten(1, {q_heads + 2 * kv_heads, size}).split_with_sizes({q_heads, kv_heads, kv_heads}, 1);
        const at::Tensor cos = table.cos.cpu().index_select(0, positions.cpu()).to(at::kDouble);
        const at::Tensor sin = table.sin.cpu().index_select(0, positions.cpu()).to(at::kDouble);
        const at::Tensor rq = plain_head(heads[0], rq_norm, cos, sin);
        const at::Tensor rk = plain_head(heads[1], rk_norm, cos, sin);
        const auto host = [](const at::Tensor& t) { return t.to(at::kCPU, at::kDouble); };
        ((rq * host(dq)).sum() + (rk * host(dk)).sum() + (heads[2] * host(dv)).sum()).backward();

        const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-2;
        EXPECT_TRUE(tensors_close(q, rq, tolerance, tolerance));
        EXPECT_TRUE(tensors_close(k, rk, tolerance, tolerance));
        EXPECT_TRUE(tensors_identical(v, heads[2].to(dtype)));
        EXPECT_TRUE(tensors_close(qkv.grad(), x.grad(), tolerance, 3 * tolerance));
        const double sum_error = 1e-6 * static_cast<double>(tokens * q_heads + 1);
        EXPECT_TRUE(tensors_close(q_norm.grad, rq_norm.grad(), 1e-5, sum_error));
        EXPECT_TRUE(tensors_close(k_norm.grad, rk_norm.grad(), 1e-5, sum_error));
      }
    }
  }
}

TEST(QkNormRope, WithoutNormsItSplitsAndRotates) {
  const Shape shapes[] = {{0, 2, 1, 8}, {1, 1, 1, 2}, {19, 3, 3, 6}, {67, 8, 2, 64}};
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [tokens, q_heads, kv_heads, size] : shapes) {
        SCOPED_TRACE(fmt::format("{} tokens, {} and {} heads of {} {} {}", tokens, q_heads, kv_heads, size,
                                 c10::toString(dtype), device.str()));
        const at::Tensor qkv = with_grad(random_tensor({tokens, (q_heads + 2 * kv_heads) * size}, dtype, device, 1));
        const RopeTable table = make_rope_table(rope_inverse_frequencies(1e4, size), 50, 1.2, device);
        const at::Tensor positions = some_positions(tokens, device);
        const auto [q, k, v] = split_and_rotate(qkv, table, positions, q_heads, kv_heads);
        const at::Tensor d = random_tensor({tokens, q_heads + 2 * kv_heads, size}, dtype, device, 4);
        at::cat({q, k, v}, 1).backward(d);

        const at::Tensor x = reference_leaf(qkv);
        const auto heads =
            x.unflatten(1, {q_heads + 2 * kv_heads, size}).split_with_sizes({q_heads, kv_heads, kv_heads}, 1);
        const auto turned = [&](const at::Tensor& part) {
          const auto of = [&](const at::Tensor& all) {
            return all.cpu().index_select(0, positions.cpu()).to(at::kDouble).unsqueeze(1);
          };
          const auto halves = part.chunk(2, -1);
          return at::cat({halves[0] * of(table.cos) - halves[1] * of(table.sin),
                          halves[1] * of(table.cos) + halves[0] * of(table.sin)},
                         -1);
        };
        const at::Tensor rq = turned(heads[0]), rk = turned(heads[1]);
        at::cat({rq, rk, heads[2]}, 1).backward(d.to(at::kCPU, at::kDouble));
        const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-2;
        EXPECT_TRUE(tensors_close(q, rq, tolerance, tolerance));
        EXPECT_TRUE(tensors_close(k, rk, tolerance, tolerance));
        EXPECT_TRUE(tensors_identical(v, heads[2].to(dtype)));
        EXPECT_TRUE(tensors_close(qkv.grad(), x.grad(), tolerance, tolerance));
      }
    }
  }
}

TEST(QkNormRope, RotateFrontLeavesTheRest) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t rotary : {2, 6, 16}) {
        for (const int64_t tokens : {0, 1, 37}) {
          // Heads with gaps between them, as a projection has them.
          const at::Tensor heads = with_grad(random_tensor({tokens, 3, 2, 16}, dtype, device, 1));
          const RopeTable table = make_rope_table(rope_inverse_frequencies(1e4, rotary), 50, 1.0, device);
          const at::Tensor positions = some_positions(tokens, device);
          const at::Tensor turned = rotate_front(heads.unbind(2)[0], table, positions);
          const at::Tensor d = random_tensor({tokens, 3, 16}, dtype, device, 2);
          turned.backward(d);
          const at::Tensor front =
              with_grad(heads.detach().select(2, 0).narrow(2, 0, rotary).flatten(1).repeat({1, 3}));
          const at::Tensor expected = std::get<0>(split_and_rotate(front, table, positions, 3, 3));
          expected.backward(d.narrow(2, 0, rotary));
          // On a GPU the kernel fuses a product and a sum, which rounds once less.
          const double rounding = dtype == at::kFloat ? 1e-6 : 1e-2;
          EXPECT_TRUE(tensors_close(turned.narrow(2, 0, rotary), expected, rounding, rounding));
          EXPECT_TRUE(tensors_identical(turned.slice(2, rotary), heads.select(2, 0).slice(2, rotary)));
          const at::Tensor grad = heads.grad().select(2, 0);
          EXPECT_TRUE(tensors_close(grad.narrow(2, 0, rotary),
                                    front.grad().narrow(1, 0, 3 * rotary).unflatten(1, {3, rotary}), rounding,
                                    rounding));
          EXPECT_TRUE(tensors_identical(grad.slice(2, rotary), d.slice(2, rotary)));
        }
      }
    }
  }
}

TEST(QkNormRope, NormGradientsRepeatToTheBit) {
  for (const at::Device device : test_devices()) {
    const at::Tensor qkv = with_grad(random_tensor({2311, 4 * 64}, at::kFloat, device, 1));
    const RopeTable table = make_rope_table(rope_inverse_frequencies(1e6, 64), 50, 1.0, device);
    const at::Tensor positions = some_positions(2311, device);
    at::Tensor q_once, k_once, x_once;
    for (int repeat = 0; repeat < 4; ++repeat) {
      const Parameter q_norm = make_parameter(random_tensor({64}, at::kFloat, device, 2));
      const Parameter k_norm = make_parameter(random_tensor({64}, at::kFloat, device, 3));
      qkv.mutable_grad() = at::Tensor();
      const auto [q, k, v] = qk_norm_rope(qkv, q_norm, k_norm, table, positions, 2, 1, kEps);
      (q.pow(3).sum() + k.pow(3).sum() + v.sum()).backward();
      if (repeat > 0) {
        EXPECT_TRUE(tensors_identical(q_norm.grad, q_once));
        EXPECT_TRUE(tensors_identical(k_norm.grad, k_once));
        EXPECT_TRUE(tensors_identical(qkv.grad(), x_once));
      }
      q_once = q_norm.grad;
      k_once = k_norm.grad;
      x_once = qkv.grad();
    }
  }
}

// fp64 angles of fp32 products, at positions where a wrong table would be far off.
TEST(QkNormRope, TableMatchesTheFormula) {
  const auto frequencies = rope_inverse_frequencies(1e6, 128);
  ASSERT_EQ(frequencies.size(), 64u);
  EXPECT_DOUBLE_EQ(frequencies[0], 1.0);
  EXPECT_NEAR(frequencies[63], std::pow(1e6, -126.0 / 128.0), 1e-18);
  const RopeTable table = make_rope_table(frequencies, 4096, 2.0, at::kCPU);
  for (const int64_t position : {0, 1, 63, 4095}) {
    for (const int64_t pair : {0, 1, 31, 63}) {
      const double angle = static_cast<float>(frequencies[pair]) * static_cast<float>(position);
      EXPECT_NEAR(table.cos[position][pair].item<float>(), 2 * std::cos(angle), 2e-7);
      EXPECT_NEAR(table.sin[position][pair].item<float>(), 2 * std::sin(angle), 2e-7);
    }
  }
}

TEST(QkNormRope, ValuesShareMemoryAndStridedInputWorks) {
  for (const at::Device device : test_devices()) {
    const RopeTable table = make_rope_table(rope_inverse_frequencies(1e4, 8), 50, 1.0, device);
    const Parameter norm{"norm", at::ones({8}, device), {}};
    const at::Tensor wide = random_tensor({6, 64}, at::kFloat, device, 1);
    const at::Tensor qkv = wide.narrow(1, 16, 32).contiguous();
    const at::Tensor positions = some_positions(6, device);
    const auto [q, k, v] = qk_norm_rope(qkv, norm, norm, table, positions, 2, 1, kEps);
    EXPECT_EQ(v.const_data_ptr<float>(), qkv.const_data_ptr<float>() + 24);
    EXPECT_EQ(v.stride(0), 32);
    EXPECT_FALSE(q.requires_grad());
    const auto [q2, k2, v2] = qk_norm_rope(wide.narrow(1, 16, 32), norm, norm, table, positions, 2, 1, kEps);
    EXPECT_TRUE(tensors_identical(q2, q));
    EXPECT_TRUE(tensors_identical(k2, k));
    EXPECT_TRUE(tensors_identical(v2, v));
  }
}

TEST(QkNormRope, APositionOutsideTheTableIsNamed) {
  const RopeTable table = make_rope_table(rope_inverse_frequencies(1e4, 8), 4, 1.0, at::kCPU);
  const Parameter norm{"norm", at::ones({8}), {}};
  try {
    qk_norm_rope(at::ones({2, 24}), norm, norm, table, at::tensor({3, 4}, at::kInt), 1, 1, kEps);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(error.report().what.find("position 4 of token 1"), std::string::npos);
  }
}

}  // namespace
}  // namespace marrow
