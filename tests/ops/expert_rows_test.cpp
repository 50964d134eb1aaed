#include "ops/expert_rows.h"

#include "ops/grouped_linear.h"
#include "ops/op_test_support.h"
#include "ops/rows.h"
#include "ops/swiglu.h"

namespace marrow {
namespace {

using at::Tensor;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

int64_t blocks_of(const Tensor& offsets) {  // of columns, where experts' rows are turned
  int64_t blocks = 0, begin = 0;
  for (int64_t e = 0; e < offsets.size(0); ++e) {
    const auto end = offsets[e].item<int64_t>();
    blocks += (end - begin + kFp8Block - 1) / kFp8Block;
    begin = end;
  }
  return blocks;
}

enum class Products { kBf16, kTwoInFp8, kAllInFp8 };  // two: the weight is frozen, its gradient not wanted

Parameter in_fp8(at::IntArrayRef shape, at::Device device, int64_t seed, Products products = Products::kTwoInFp8) {
  Parameter weight = make_parameter(random_tensor(shape, at::kBFloat16, device, seed, 0.1));
  if (products != Products::kBf16) weight.fp8 = std::make_shared<Fp8Weight>(/*at_any_size=*/true);
  if (products == Products::kTwoInFp8) weight.grad = Tensor();
  return weight;
}

void expect_same(const Fp8Matrix& got, const Fp8Matrix& want, int64_t rows, int64_t columns) {
  const auto bytes = [&](const Fp8Matrix& matrix) {
    return matrix.data.cpu().view(at::kByte).slice(0, 0, rows).slice(1, 0, columns);
  };
  EXPECT_TRUE(at::equal(bytes(got), bytes(want)));
}

// What was handed over is, to the bit, what quantize_expert_rows makes of the rows afterwards.
void expect_handed_over(const std::shared_ptr<Fp8Handover>& handover, const Tensor& rows, const Tensor& offsets,
                        const Tensor& made_of) {
  ASSERT_NE(handover, nullptr);
  ASSERT_TRUE(handover->of.defined());
  EXPECT_EQ(handover->of.data_ptr(), rows.data_ptr());
  EXPECT_EQ(handover->forms.rows.data.sizes(), rows.sizes());
  const bool both = handover->both;
  const Fp8Pair got = take_over(handover, rows, offsets, true, both);
  const Fp8Pair want = quantize_expert_rows(made_of, offsets, true, both);
  EXPECT_FALSE(handover->of.defined() || handover->forms.rows.data.defined()) << "the memory is kept";
  const int64_t real = offsets[-1].item<int64_t>(), width = rows.size(1);
  expect_same(got.rows, want.rows, real, width);
  const auto scales = [](const Tensor& all, int64_t count) { return all.cpu().flatten().slice(0, 0, count); };
  const int64_t blocks = (width + kFp8Block - 1) / kFp8Block;
  EXPECT_TRUE(tensors_identical(scales(got.rows.scale, real * blocks), scales(want.rows.scale, real * blocks)));
  if (!both) return;
  const int64_t used = blocks_of(offsets);
  expect_same(got.transposed, want.transposed, width, used * kFp8Block);
  EXPECT_TRUE(tensors_identical(scales(got.transposed.scale.t(), used * width),
                                scales(want.transposed.scale.t(), used * width)));
}

// The rows that exist: behind them a GPU writes nothing.
Tensor existing(const Tensor& rows, const Tensor& offsets) { return rows.slice(0, 0, offsets[-1].item<int64_t>()); }

// As training has them, with outliers, with rows that are not finite, and tiny ones.
std::vector<std::pair<std::string, Tensor>> inputs(int64_t rows, int64_t columns, at::Device device, int64_t seed) {
  const auto normal = [&] { return random_tensor({rows, columns}, at::kFloat, at::kCPU, seed); };
  const Tensor outlier = normal(), bad = normal();
  outlier[rows / 2][1] = 3e4;
  bad[0][columns - 1] = kNan;
  bad[rows - 1][0] = std::numeric_limits<double>::infinity();
  std::vector<std::pair<std::string, Tensor>> all = {
      {"normal", normal()}, {"outlier", outlier}, {"not finite", bad}, {"tiny", normal() * 1e-34}};
  for (auto& [name, tensor] : all) tensor = tensor.to(device, at::kBFloat16);
  return all;
}

const std::vector<std::vector<int64_t>> kCounts = {{1}, {5, 0, 3, 1}, {0, 131, 0, 7, 17, 0}, {64, 64}, {0, 0, 40}};

TEST(ExpertRows, SwigluHandsOverWhatItMakes) {
  for (const at::Device device : test_devices()) {
    for (const int64_t inner : {16, 128, 384, 272, 1040}) {  // 272 and 1040: blocks would reach over the middle
      for (const auto& counts : kCounts) {
        const Tensor offsets = at::tensor(counts).cumsum(0).to(device, at::kInt);
        const int64_t total = offsets[-1].item<int64_t>() + 3;  // three rows of no expert
        const auto experts = static_cast<int64_t>(counts.size());
        const Parameter up = in_fp8({experts, 2 * inner, 32}, device, 1),
                        down = in_fp8({experts, 48, inner}, device, 2);
        for (const auto& [name, x] : inputs(total, 2 * inner, device, 3)) {
          SCOPED_TRACE(fmt::format("{} {} inner {} experts {} rows {}", device.str(), name, inner, experts, total));
          const Tensor leaf = with_grad(x), plain = with_grad(x);
          const Tensor weight = with_grad(random_tensor({total}, at::kFloat, device, 4)),
                       plain_weight = with_grad(weight);
          const Tensor d_out = random_tensor({total, inner}, at::kBFloat16, device, 5);
          const ExpertRows gate_up{leaf, offsets, nullptr, make_handover(up, Fp8Product::kExpertInputGrad, leaf)};
          const ExpertRows out = swiglu(gate_up, weight, down);
          const Tensor want = swiglu(plain, plain_weight);
          EXPECT_TRUE(tensors_identical(existing(out.value, offsets), existing(want, offsets)));
          EXPECT_TRUE(
              tensors_identical(existing(swiglu(x, weight.detach(), offsets), offsets), existing(want, offsets)));
          expect_handed_over(out.fp8, out.value, offsets, out.value);
          out.value.backward(d_out);
          want.backward(d_out);
          EXPECT_TRUE(tensors_identical(existing(leaf.grad(), offsets), existing(plain.grad(), offsets)));
          EXPECT_TRUE(tensors_identical(existing(weight.grad(), offsets), existing(plain_weight.grad(), offsets)));
          expect_handed_over(gate_up.d_value_fp8, leaf.grad(), offsets, leaf.grad());
        }
      }
    }
  }
}

TEST(ExpertRows, GatherAndTheGradientOfSumHandOverWhatTheyMake) {
  for (const at::Device device : test_devices()) {
    for (const int64_t width : {16, 128, 272, 2048, 2320}) {
      for (const int64_t tokens : {1, 7, 40}) {
        // Expert 3 is held by nobody here, so that some rows have no pair; expert 1 is chosen by none.
        const Tensor experts =
            at::stack({at::arange(tokens).remainder(3).eq(1).to(at::kInt) * 2, at::full({tokens}, 3)}, 1)
                .to(device, at::kInt);
        const ExpertPermutation order = expert_permutation(experts.contiguous(), 3);
        for (const auto& [name, x] : inputs(tokens, width, device, 3)) {
          SCOPED_TRACE(fmt::format("{} {} width {} tokens {}", device.str(), name, width, tokens));
          const int64_t count = 2 * tokens - 1;  // fewer than the map has
          const Tensor want = gather_rows(x, order.map, count);
          EXPECT_TRUE(tensors_identical(existing(gather_rows(x, order.map, count, order.offsets), order.offsets),
                                        existing(want, order.offsets)));
          for (const Products products : {Products::kTwoInFp8, Products::kAllInFp8}) {
            const bool alone = products == Products::kAllInFp8;  // then the CPU leaves it to the product
            const ExpertRows rows = gather_expert_rows(x, order, count, in_fp8({3, 32, width}, device, 1, products));
            const Tensor results = with_grad(at::zeros({count, width}, x.options()));
            const ExpertRows to_sum{results, order.offsets, nullptr,
                                    std::make_shared<Fp8Handover>(Fp8Handover{alone, {}, {}})};
            sum_rows(to_sum, order.map, {}).backward(x);
            const Tensor d_results = results.grad();
            for (const Tensor& made : {rows.value, d_results}) {
              if (alone && device.is_cuda()) {
                EXPECT_EQ(made.storage().nbytes(), 0);
              } else {
                EXPECT_TRUE(tensors_identical(existing(made, order.offsets), existing(want, order.offsets)));
              }
            }
            EXPECT_EQ(rows.only_in_fp8(), alone);
            if (alone && device.is_cpu()) continue;
            expect_handed_over(rows.fp8, rows.value, order.offsets, want);
            expect_handed_over(to_sum.d_value_fp8, d_results, order.offsets, want);
          }
        }
      }
    }
  }
}

struct Layer {
  Tensor out, dx, d_weights, d_up, d_down;
};

// The experts of a layer: with what operators hand over, or each product quantising for itself.
Layer run_layer(at::Device device, bool handing_over, Products products) {
  const int64_t tokens = 50, hidden = 256, inner = 384;
  const Tensor scores = random_tensor({tokens, 5}, at::kFloat, at::kCPU, 1);
  const ExpertPermutation order = expert_permutation(std::get<1>(scores.topk(2)).to(device, at::kInt).contiguous(), 5);
  const Parameter up = in_fp8({5, 2 * inner, hidden}, device, 2, products),
                  down = in_fp8({5, hidden, inner}, device, 3, products);
  const Tensor x = with_grad(random_tensor({tokens, hidden}, at::kBFloat16, device, 4));
  const Tensor weights = with_grad(random_tensor({2 * tokens}, at::kFloat, device, 5));
  const Tensor d_out = random_tensor({tokens, hidden}, at::kBFloat16, device, 6);
  WeightGradQueue queue;
  Tensor out;
  if (handing_over) {
    const ExpertRows rows = gather_expert_rows(x, order, 2 * tokens, up);
    const ExpertRows gate_up = grouped_linear(rows, up, queue), activated = swiglu(gate_up, weights, down);
    const ExpertRows results = grouped_linear(activated, down, queue);
    EXPECT_EQ(results.fp8, nullptr);
    for (const auto& handover : {rows.fp8, gate_up.d_value_fp8, activated.fp8, results.d_value_fp8}) {
      EXPECT_EQ(handover != nullptr, products != Products::kBf16);
    }
    out = sum_rows(results, order.map, x);
    out.backward(d_out);
    for (const auto& handover : {rows.fp8, gate_up.d_value_fp8, activated.fp8, results.d_value_fp8}) {
      EXPECT_FALSE(handover != nullptr && handover->of.defined()) << "not taken";
    }
  } else {
    const Tensor gate_up = grouped_linear(gather_rows(x, order.map, 2 * tokens), up, order.offsets, queue);
    out = sum_rows(grouped_linear(swiglu(gate_up, weights), down, order.offsets, queue), order.map, x);
    out.backward(d_out);
  }
  queue.run_all();
  return {out, x.grad(), weights.grad(), up.grad, down.grad};
}

TEST(ExpertRows, ALayerIsTheSameToTheBit) {
  for (const at::Device device : test_devices()) {
    for (const Products products : {Products::kBf16, Products::kTwoInFp8, Products::kAllInFp8}) {
      const Layer got = run_layer(device, true, products), want = run_layer(device, false, products);
      EXPECT_TRUE(tensors_identical(got.out, want.out));
      EXPECT_TRUE(tensors_identical(got.dx, want.dx));
      EXPECT_TRUE(tensors_identical(got.d_weights, want.d_weights));
      if (products == Products::kTwoInFp8) continue;
      EXPECT_TRUE(tensors_identical(got.d_up, want.d_up));
      EXPECT_TRUE(tensors_identical(got.d_down, want.d_down));
    }
  }
}

// As in the first pass of train.recompute = "layer".
TEST(ExpertRows, WithoutGradientNothingIsMadeForTheWeights) {
  for (const at::Device device : test_devices()) {
    const Parameter weight = in_fp8({3, 32, 64}, device, 1, Products::kAllInFp8);
    const Tensor rows = random_tensor({10, 64}, at::kBFloat16, device, 2);
    EXPECT_TRUE(make_handover(weight, Fp8Product::kExpertForward, rows)->both);
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(make_handover(weight, Fp8Product::kExpertForward, rows)->both);
  }
}

// What is not handed over is made; rows without memory are no other rows without memory.
TEST(ExpertRows, TakesOverAllOrNothing) {
  for (const at::Device device : test_devices()) {
    const Tensor offsets = at::tensor({20, 33}).to(device, at::kInt);
    const Tensor x = random_tensor({33, 256}, at::kBFloat16, device, 2);
    const auto half = std::make_shared<Fp8Handover>();
    *half = {false, x, quantize_expert_rows(x * 2, offsets, true, false)};
    const Fp8Pair got = take_over(half, x, offsets, true, true), want = quantize_expert_rows(x, offsets, true, true);
    const auto scales = [](const Fp8Matrix& matrix) { return matrix.scale.flatten(); };
    EXPECT_TRUE(tensors_identical(scales(got.rows), scales(want.rows)));
    ASSERT_TRUE(got.transposed.data.defined());
    expect_same(got.transposed, want.transposed, 256, 2 * kFp8Block);
    const auto without_memory = [&] {
      const Tensor rows = at::empty({0}, x.options());
      rows.unsafeGetTensorImpl()->set_sizes_contiguous(x.sizes());
      return rows;
    };
    const Tensor empty = without_memory();
    *half = {true, empty, want};
    EXPECT_THROW(take_over(half, without_memory(), offsets, true, true), Error);
    *half = {true, empty, want};
    EXPECT_TRUE(take_over(half, empty, offsets, true, true).rows.data.is_same(want.rows.data));
  }
}

// Products read what was handed over, and only for the very tensor that it was made of.
TEST(ExpertRows, ProductsTakeTheFormOfTheirRowsAlone) {
  for (const at::Device device : test_devices()) {
    const Tensor offsets = at::tensor({20, 33}).to(device, at::kInt);
    const Tensor x = random_tensor({33, 256}, at::kBFloat16, device, 2),
                 dy = random_tensor({33, 128}, at::kBFloat16, device, 3);
    const auto run = [&](const Tensor& x_form, const Tensor& x_of, const Tensor& d_form, const Tensor& d_of) {
      const Parameter weight = in_fp8({2, 128, 256}, device, 1, Products::kAllInFp8);
      WeightGradQueue queue;
      const Tensor leaf = with_grad(x);
      const auto form = std::make_shared<Fp8Handover>();
      *form = {true, x_of.defined() ? x_of : leaf.detach(), quantize_expert_rows(x_form, offsets, true, true)};
      const ExpertRows out = grouped_linear({leaf, offsets, form}, weight, queue);
      *out.d_value_fp8 = {true, d_of, quantize_expert_rows(d_form, offsets, true, true)};
      out.value.backward(dy);
      queue.run_all();
      return std::tuple(out.value.detach(), leaf.grad(), weight.grad);
    };
    const auto [y, dx, dw] = run(x, {}, dy, dy);
    const auto [double_y, double_dx, four_dw] = run(x * 2, {}, dy * 2, dy);
    EXPECT_TRUE(tensors_identical(double_y, y * 2));
    EXPECT_TRUE(tensors_identical(double_dx, dx * 2));
    EXPECT_TRUE(tensors_identical(four_dw, dw * 4));
    const auto [same_y, same_dx, same_dw] = run(x * 2, x * 2, dy * 2, dy.clone());
    EXPECT_TRUE(tensors_identical(same_y, y));
    EXPECT_TRUE(tensors_identical(same_dx, dx));
    EXPECT_TRUE(tensors_identical(same_dw, dw));
  }
}

}  // namespace
}  // namespace marrow
