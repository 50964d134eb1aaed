#include "ops/mla_rope.h"

#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

struct Shape {
  int64_t tokens, heads, nope, rope, value;
};

// x [T, H, R]: pairs (2i, 2i + 1) as complex numbers, times e^(i·angle).
Tensor plain_turn(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const Tensor pairs = x.unflatten(2, {-1, 2}), a = pairs.select(3, 0), b = pairs.select(3, 1);
  const Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);
  return at::stack({a * c - b * s, b * c + a * s}, 3).flatten(2);
}

TEST(MlaRope, MatchesPlainComposition) {
  // Of a GPU's kernels, which move pairs or packs: heads fewer than a block's groups of threads and more, groups that
  // leave threads over, heads too wide for one block, in pairs and in packs, and each size the only one of no packs.
  const Shape shapes[] = {{0, 2, 4, 2, 4},       {1, 1, 2, 2, 2},       {7, 3, 6, 10, 4},     {19, 2, 0, 8, 6},
                          {67, 4, 128, 64, 128}, {9, 16, 128, 64, 128}, {5, 1, 128, 64, 128}, {6, 37, 64, 32, 48},
                          {8, 45, 0, 8, 16},     {4, 131, 6, 10, 4},    {3, 5, 130, 66, 150}, {3, 5, 512, 64, 128},
                          {5, 3, 10, 16, 16},    {5, 3, 16, 10, 16},    {5, 3, 16, 16, 10}};
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [tokens, heads, nope, rope, value] : shapes) {
        SCOPED_TRACE(fmt::format("{} tokens, {} heads of {} + {}, {} {} {}", tokens, heads, nope, rope, value,
                                 c10::toString(dtype), device.str()));
        const Tensor q = with_grad(random_tensor({tokens, heads * (nope + rope)}, dtype, device, 1));
        const Tensor kv = with_grad(random_tensor({tokens, heads * (nope + value)}, dtype, device, 2));
        const Tensor wide = with_grad(random_tensor({tokens, 5 + rope}, dtype, device, 3));
        const RopeTable table = make_rope_table(rope_inverse_frequencies(1e4, rope), 50, 1.5, device);
        const Tensor positions = at::arange(tokens, at::kInt).mul(7).remainder(50).to(at::kInt).to(device);
        const auto [qo, ko, vo] = mla_rope(q, kv, wide.narrow(1, 5, rope), table, positions, heads, value);
        for (const Tensor& out : {qo, ko, vo}) EXPECT_TRUE(out.is_contiguous());
        const Tensor dq = random_tensor({tokens, heads, nope + rope}, dtype, device, 4);
        const Tensor dk = random_tensor({tokens, heads, nope + rope}, dtype, device, 5);
        const Tensor dv = random_tensor({tokens, heads, value}, dtype, device, 6);
        ((qo * dq).sum(at::kDouble) + (ko * dk).sum(at::kDouble) + (vo * dv).sum(at::kDouble)).backward();

        const Tensor rq = reference_leaf(q), rkv = reference_leaf(kv), rw = reference_leaf(wide);
        const Tensor at = positions.cpu();
        const Tensor cos = table.cos.cpu().index_select(0, at).to(at::kDouble);
        const Tensor sin = table.sin.cpu().index_select(0, at).to(at::kDouble);
        const Tensor query = rq.unflatten(1, {heads, nope + rope}), latent = rkv.unflatten(1, {heads, nope + value});
        const Tensor expected_q =
            at::cat({query.narrow(2, 0, nope), plain_turn(query.narrow(2, nope, rope), cos, sin)}, 2);
        const Tensor turned = plain_turn(rw.narrow(1, 5, rope).unsqueeze(1), cos, sin);
        const Tensor expected_k = at::cat({latent.narrow(2, 0, nope), turned.expand({tokens, heads, rope})}, 2);
        const Tensor expected_v = latent.narrow(2, nope, value);
        const auto host = [](const Tensor& t) { return t.to(at::kCPU, at::kDouble); };
        ((expected_q * host(dq)).sum() + (expected_k * host(dk)).sum() + (expected_v * host(dv)).sum()).backward();

        const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-2;
        EXPECT_TRUE(tensors_close(qo, expected_q, tolerance, tolerance));
        EXPECT_TRUE(tensors_close(ko, expected_k, tolerance, tolerance));
        EXPECT_TRUE(tensors_identical(vo, expected_v.to(dtype)));
        EXPECT_TRUE(tensors_close(q.grad(), rq.grad(), tolerance, tolerance));
        EXPECT_TRUE(tensors_close(kv.grad(), rkv.grad(), tolerance, tolerance));
        EXPECT_TRUE(tensors_close(wide.grad(), rw.grad(), tolerance, 2 * tolerance));
      }
    }
  }
}

// A GPU's kernel then moves pairs.
TEST(MlaRope, StartsAnywhere) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const RopeTable table = make_rope_table(rope_inverse_frequencies(1e4, 16), 8, 1.0, device);
      const Tensor positions = at::arange(5, at::kInt).to(device);
      const auto shifted = [](const Tensor& x) {
        const Tensor flat = at::cat({x.flatten().slice(0, 0, 2), x.flatten()});
        return flat.slice(0, 2).view(x.sizes());
      };
      const Tensor q = random_tensor({5, 3 * 48}, dtype, device, 1), kv = random_tensor({5, 3 * 48}, dtype, device, 2);
      const Tensor k_rope = random_tensor({5, 16}, dtype, device, 3);
      const auto [q_out, k_out, v_out] = mla_rope(shifted(q), shifted(kv), k_rope, table, positions, 3, 16);
      const auto [q_want, k_want, v_want] = mla_rope(q, kv, k_rope, table, positions, 3, 16);
      EXPECT_TRUE(tensors_identical(q_out, q_want));
      EXPECT_TRUE(tensors_identical(k_out, k_want));
      EXPECT_TRUE(tensors_identical(v_out, v_want));
    }
  }
}

TEST(MlaRope, RefusesWhatDoesNotFit) {
  const RopeTable table = make_rope_table(rope_inverse_frequencies(1e4, 4), 8, 1.0, at::kCPU);
  const Tensor positions = at::tensor({3, 8}, at::kInt), kv = at::ones({2, 8}), k_rope = at::ones({2, 4});
  EXPECT_THROW(mla_rope(at::ones({2, 8}), kv, k_rope, table, positions, 1, 4), Error);              // position 8
  EXPECT_THROW(mla_rope(at::ones({2, 7}), kv, k_rope, table, positions.clamp(0, 7), 1, 5), Error);  // odd
  EXPECT_THROW(mla_rope(at::ones({2, 8}), kv, k_rope, table, positions.clamp(0, 7), 1, 2), Error);  // kv
  EXPECT_NO_THROW(mla_rope(at::ones({2, 8}), kv, k_rope, table, positions.clamp(0, 7).to(at::kInt), 1, 4));
}

}  // namespace
}  // namespace marrow
