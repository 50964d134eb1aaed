#include "ops/fp8_quantize.h"

#include <bit>

#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

// Inputs as training has them, and those that break scales.
std::vector<std::pair<std::string, Tensor>> inputs(int64_t rows, int64_t columns, at::Device device, int64_t seed) {
  const auto normal = [&](double scale) { return random_tensor({rows, columns}, at::kFloat, at::kCPU, seed, scale); };
  const Tensor outlier = normal(1);
  outlier[0][1] = 3e4;
  std::vector<std::pair<std::string, Tensor>> all = {{"normal", normal(1)},
                                                     {"heavy-tailed", normal(1).pow(5)},
                                                     {"constant", at::full({rows, columns}, 0.7)},
                                                     {"zero", at::zeros({rows, columns})},
                                                     {"tiny", normal(1e-34)},
                                                     {"small", normal(1e-9)},
                                                     {"large", normal(1e30)},
                                                     {"outlier", outlier}};
  for (auto& [name, tensor] : all) tensor = tensor.to(device, at::kBFloat16);
  return all;
}

// The definition, a block at a time in plain ATen, as fp32.
Tensor quantized_plainly(const Tensor& x, int64_t height) {
  const Tensor in = x.cpu().to(at::kFloat), out = at::empty_like(in);
  for (int64_t r = 0; r < in.size(0); r += height) {
    for (int64_t c = 0; c < in.size(1); c += kFp8Block) {
      const auto block = [&](const Tensor& whole) { return whole.slice(0, r, r + height).slice(1, c, c + kFp8Block); };
      const auto most = block(in).abs().amax().item<double>();
      double scale = std::exp2(-100);
      while (448 * scale < most && std::isfinite(most)) scale *= 2;
      if (!std::isfinite(most)) scale = kNan;
      const Tensor values = (block(in).to(at::kDouble) / scale).to(at::kFloat);
      block(out).copy_(values.to(at::kFloat8_e4m3fn).to(at::kFloat) * scale);
    }
  }
  return out;
}

double relative_error(const Tensor& actual, const Tensor& expected) {
  const Tensor a = actual.detach().cpu().to(at::kDouble), b = expected.detach().cpu().to(at::kDouble);
  return ((a - b).norm() / b.norm().clamp_min(1e-300)).item<double>();
}

TEST(Fp8Quantize, ScalesAreTheLeastPowersOfTwoThatFit) {
  const auto scale_of = [](float most) { return std::bit_cast<float>(fp8_scale_bits(std::bit_cast<uint32_t>(most))); };
  EXPECT_EQ(scale_of(448.0f), 1.0f);
  EXPECT_EQ(scale_of(std::nextafter(448.0f, 1e9f)), 2.0f);
  EXPECT_EQ(scale_of(1.75f), std::exp2(-8.0f));
  EXPECT_EQ(scale_of(1.0f), std::exp2(-8.0f));
  EXPECT_EQ(scale_of(0.0f), std::exp2(-100.0f));
  EXPECT_EQ(scale_of(1e-40f), std::exp2(-100.0f));  // no normal number
  EXPECT_EQ(scale_of(448 * std::exp2(-100.0f)), std::exp2(-100.0f));
  EXPECT_EQ(scale_of(std::numeric_limits<float>::max()), std::exp2(120.0f));
  EXPECT_TRUE(std::isnan(scale_of(INFINITY)));
  EXPECT_TRUE(std::isnan(scale_of(NAN)));
  for (const float scale : {std::exp2(-100.0f), 1.0f, std::exp2(120.0f)}) {
    EXPECT_EQ(std::bit_cast<float>(fp8_inverse_bits(std::bit_cast<uint32_t>(scale))), 1 / scale);
  }
  EXPECT_TRUE(std::isnan(std::bit_cast<float>(fp8_inverse_bits(fp8_scale_bits(0x7fc00000u)))));
}

TEST(Fp8Quantize, RowsAreAsDefinedBothWaysRound) {
  for (const at::Device device : test_devices()) {
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{16, 16}, {144, 272}, {256, 128}, {400, 1040}}) {
      for (const auto& [name, x] : inputs(rows, columns, device, 1)) {
        SCOPED_TRACE(fmt::format("{} {} [{}, {}]", device.str(), name, rows, columns));
        const Fp8Pair both = quantize_rows(x, true, true);
        EXPECT_TRUE(tensors_identical(dequantize(both.rows).cpu(), quantized_plainly(x, 1)));
        EXPECT_TRUE(tensors_identical(dequantize(both.transposed).cpu(), quantized_plainly(x.t(), 1)));
        const Fp8Pair first = quantize_rows(x, true, false), second = quantize_rows(x, false, true);
        EXPECT_TRUE(at::equal(first.rows.data.view(at::kByte), both.rows.data.view(at::kByte)));
        EXPECT_TRUE(at::equal(second.transposed.data.view(at::kByte), both.transposed.data.view(at::kByte)));
        EXPECT_FALSE(first.transposed.data.defined() || second.rows.data.defined());
      }
    }
  }
}

// Turned round, an expert's rows are blocks of their own, with zeros behind them.
TEST(Fp8Quantize, ExpertRowsAreAsDefinedBothWaysRound) {
  for (const at::Device device : test_devices()) {
    std::vector<int64_t> many(70, 1);  // experts: more than a warp looks at at once
    many[40] = 0;
    many[69] = 200;
    for (const auto& counts : {std::vector<int64_t>{1}, {0, 130, 0, 128, 3}, {0, 0}, many}) {
      for (const auto& [name, x] : inputs(std::reduce(counts.begin(), counts.end()) + 2, 144, device, 7)) {
        SCOPED_TRACE(fmt::format("{} {} {} experts", device.str(), name, counts.size()));
        const Tensor offsets = at::tensor(counts).cumsum(0).to(device, at::kInt);
        const Fp8Pair both = quantize_expert_rows(x, offsets, true, true);
        const Tensor turned = dequantize(both.transposed).cpu();
        EXPECT_EQ(turned.size(1), expert_columns(x.size(0), std::ssize(counts)));
        int64_t begin = 0, to = 0;
        for (const int64_t count : counts) {
          const Tensor own = x.narrow(0, begin, count), found = turned.narrow(1, to, count);
          EXPECT_TRUE(tensors_identical(found, quantized_plainly(own.t(), 1)));
          begin += count;
          to += count;
          const int64_t next = (to + kFp8Block - 1) / kFp8Block * kFp8Block;
          EXPECT_EQ(turned.slice(1, to, next).abs().sum().item<double>(), 0);
          to = next;
        }
        const Fp8Pair rows = quantize_expert_rows(x, offsets, true, false),
                      columns = quantize_expert_rows(x, offsets, false, true);
        EXPECT_FALSE(rows.transposed.data.defined() || columns.rows.data.defined());
        const auto bytes = [](const Tensor& data) { return data.cpu().view(at::kByte); };
        EXPECT_TRUE(at::equal(bytes(rows.rows.data).slice(0, 0, begin), bytes(both.rows.data).slice(0, 0, begin)));
        EXPECT_TRUE(
            at::equal(bytes(columns.transposed.data).slice(1, 0, to), bytes(both.transposed.data).slice(1, 0, to)));
      }
    }
  }
}

// Rows of another tensor, some of nobody.
TEST(Fp8Quantize, GatheredRowsAreThoseOfTheGatheredTensor) {
  for (const at::Device device : test_devices()) {
    const Tensor x = random_tensor({50, 144}, at::kBFloat16, device, 1);
    const Tensor source = (at::arange(301, at::kInt) * 7).remainder(51).sub_(1).to(device);
    const Tensor offsets = at::tensor({130, 130, 299}, at::kInt).to(device);
    const Tensor rows = x.index_select(0, source.clamp_min(0)).mul_(source.ge(0).unsqueeze(1));
    const Fp8Pair got = quantize_expert_rows(x, offsets, true, true, source),
                  want = quantize_expert_rows(rows, offsets, true, true);
    EXPECT_EQ(got.rows.data.sizes(), want.rows.data.sizes());
    EXPECT_EQ(got.transposed.data.sizes(), want.transposed.data.sizes());
    const auto values = [](const Fp8Matrix& matrix, int64_t rows, int64_t columns) {
      return matrix.data.cpu().to(at::kFloat).slice(0, 0, rows).slice(1, 0, columns);
    };
    EXPECT_TRUE(tensors_identical(values(got.rows, 299, 144), values(want.rows, 299, 144)));
    EXPECT_TRUE(tensors_identical(values(got.transposed, 144, 512), values(want.transposed, 144, 512)));
    EXPECT_TRUE(tensors_identical(got.rows.scale.slice(0, 0, 2 * 299), want.rows.scale.slice(0, 0, 2 * 299)));
    EXPECT_TRUE(tensors_identical(got.transposed.scale.slice(1, 0, 4), want.transposed.scale.slice(1, 0, 4)));
  }
}

TEST(Fp8Quantize, AwkwardSizesOnTheCpu) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {0, 5}, {7, 131}, {129, 257}}) {
    const Tensor x = random_tensor({rows, columns}, at::kFloat, at::kCPU, 4);
    const Fp8Pair both = quantize_rows(x, true, true);
    EXPECT_TRUE(tensors_identical(dequantize(both.rows), quantized_plainly(x, 1)));
    EXPECT_TRUE(tensors_identical(dequantize(both.transposed), quantized_plainly(x.t(), 1)));
    if (rows == 0) continue;
    EXPECT_TRUE(tensors_identical(dequantize(quantize_weight(x).rows), quantized_plainly(x, kFp8Block)));
  }
}

TEST(Fp8Quantize, WeightsAreAsDefinedBothWaysRound) {
  for (const at::Device device : test_devices()) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{16, 32}, {144, 272}, {384, 640}, {400, 1040}}) {
      for (const auto& [name, w] : inputs(n, k, device, 2)) {
        SCOPED_TRACE(fmt::format("{} {} [{}, {}]", device.str(), name, n, k));
        const Fp8Pair dense = quantize_weight(w);
        EXPECT_TRUE(tensors_identical(dequantize(dense.rows).cpu(), quantized_plainly(w, kFp8Block)));
        EXPECT_TRUE(tensors_identical(dequantize(dense.transposed).cpu(), quantized_plainly(w.t(), kFp8Block)));
        const Tensor turned = w.flip(0).mul(3);
        const Fp8Pair experts = quantize_weight(at::stack({w, turned}));
        for (int64_t e = 0; e < 2; ++e) {
          const Tensor want = quantized_plainly(e == 0 ? w : turned, kFp8Block);
          EXPECT_TRUE(tensors_identical(dequantize(experts.rows)[e].cpu(), want));
          EXPECT_TRUE(tensors_identical(dequantize(experts.transposed)[e].cpu(), want.t()));
        }
      }
    }
  }
}

// Nothing saturates in silence: what is not finite makes its block NaN, and no other.
TEST(Fp8Quantize, NonFiniteValuesStayVisible) {
  for (const at::Device device : test_devices()) {
    for (const double bad : {kNan, kInfinity, -kInfinity}) {
      const Tensor x = random_tensor({32, 256}, at::kBFloat16, device, 3);
      x[5][130] = bad;
      const Fp8Pair both = quantize_rows(x, true, true);
      const Tensor rows = dequantize(both.rows).isnan().cpu(), columns = dequantize(both.transposed).isnan().cpu();
      EXPECT_TRUE(rows[5][130].item<bool>() && columns[130][5].item<bool>());
      EXPECT_EQ(rows.sum().item<int64_t>(), 128);
      EXPECT_EQ(rows[5].slice(0, 128).sum().item<int64_t>(), 128);
      EXPECT_EQ(columns.sum().item<int64_t>(), 32);
      EXPECT_EQ(columns[130].sum().item<int64_t>(), 32);
      const Tensor weight = dequantize(quantize_weight(x).rows).isnan().cpu();
      EXPECT_EQ(weight.sum().item<int64_t>(), 32 * 128);
    }
  }
}

Parameter in_fp8(const Tensor& value) {
  Parameter weight = make_parameter(value);
  weight.fp8 = std::make_shared<Fp8Weight>(/*at_any_size=*/true);
  return weight;
}

// Two operands of 3 bits after the point: 2^-4 at most, each about 2.6 % in the mean, so 3.7 % for a product of normal
// values; the same for a constant, whose rounding is always the same.
TEST(Fp8Linear, ProductsAreNearFp32) {
  for (const at::Device device : test_devices()) {
    for (const auto& [t, n, k] : {std::tuple<int64_t, int64_t, int64_t>{256, 512, 512}, {144, 432, 400}}) {
      const auto x_inputs = inputs(t, k, device, 1), w_inputs = inputs(n, k, device, 2),
                 d_inputs = inputs(t, n, device, 3);
      for (size_t i = 0; i < 3; ++i) {
        SCOPED_TRACE(fmt::format("{} {} [{}, {}] → {}", device.str(), x_inputs[i].first, t, k, n));
        const Tensor x = with_grad(x_inputs[i].second), &dy = d_inputs[i].second;
        const Parameter weight = in_fp8(w_inputs[i].second);
        WeightGradQueue queue;
        const Tensor y = linear(x, weight, queue);
        y.backward(dy);
        weight.grad.fill_(1);
        queue.run_all();
        const Tensor rx = reference_leaf(x), rw = reference_leaf(weight.value);
        const Tensor reference = rx.mm(rw.t());
        reference.backward(dy.cpu().to(at::kDouble));
        EXPECT_LE(relative_error(y, reference), 0.05);
        EXPECT_LE(relative_error(x.grad(), rx.grad()), 0.05);
        EXPECT_LE(relative_error(weight.grad - 1, rw.grad()), 0.05);
        if (i > 0) continue;
        EXPECT_GT(relative_error(y, reference), 0.01) << "not in fp8";
        EXPECT_GT(relative_error(x.grad(), rx.grad()), 0.01) << "not in fp8";
        EXPECT_GT(relative_error(weight.grad - 1, rw.grad()), 0.01) << "not in fp8";
      }
    }
  }
}

// What was quantised is multiplied exactly, up to the sum's order.
TEST(Fp8Linear, MultipliesWhatWasQuantised) {
  for (const at::Device device : test_devices()) {
    const Tensor x = random_tensor({272, 512}, at::kBFloat16, device, 1),
                 w = random_tensor({1008, 512}, at::kBFloat16, device, 2);
    const Fp8Pair x8 = quantize_rows(x, true, true), w8 = quantize_weight(w);
    const auto plain = [](const Fp8Matrix& a, const Fp8Matrix& b) {
      return dequantize(a).cpu().to(at::kDouble).mm(dequantize(b).cpu().to(at::kDouble).t());
    };
    EXPECT_LE(relative_error(fp8_product(x8.rows, w8.rows, at::kFloat), plain(x8.rows, w8.rows)), 2e-3);
    EXPECT_LE(relative_error(fp8_product(x8.rows, w8.rows, at::kBFloat16), plain(x8.rows, w8.rows)), 3e-3);
    const Fp8Pair dy8 = quantize_rows(random_tensor({272, 1008}, at::kBFloat16, device, 3), true, true);
    EXPECT_LE(relative_error(fp8_product(dy8.rows, w8.transposed, at::kFloat), plain(dy8.rows, w8.transposed)), 2e-3);
    EXPECT_LE(
        relative_error(fp8_product(dy8.transposed, x8.transposed, at::kFloat), plain(dy8.transposed, x8.transposed)),
        2e-3);
  }
}

TEST(Fp8Linear, BiasFrozenWeightInferenceAndNoTokens) {
  for (const at::Device device : test_devices()) {
    const Parameter weight = in_fp8(random_tensor({48, 64}, at::kBFloat16, device, 1));
    const Parameter bias = make_parameter(random_tensor({48}, at::kBFloat16, device, 2), "bias");
    WeightGradQueue queue;
    const Tensor x = with_grad(random_tensor({32, 64}, at::kBFloat16, device, 3));
    const Tensor dy = random_tensor({32, 48}, at::kBFloat16, device, 4), plain = linear(x, weight, queue);
    linear(x, weight, queue, &bias).backward(dy);
    queue.run_all();
    EXPECT_TRUE(tensors_close(bias.grad, dy.to(at::kFloat).sum(0), 1e-5, 1e-4));
    EXPECT_TRUE(tensors_close(linear(x, weight, queue, &bias), plain + bias.value, 1e-2, 1e-2));
    {
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(tensors_identical(linear(x, weight, queue), plain));
    }
    Parameter frozen = weight;
    frozen.grad = Tensor();
    linear(x, frozen, queue).backward(dy);
    EXPECT_TRUE(queue.empty());
    const Tensor none = with_grad(at::empty({0, 64}, x.options()));
    linear(none, weight, queue).backward(at::empty({0, 48}, x.options()));
    queue.run_all();
    EXPECT_EQ(none.grad().sizes(), none.sizes());
  }
}

TEST(Fp8Linear, NanReachesWhatItMustAndAnOutlierHarmsItsRowAlone) {
  for (const at::Device device : test_devices()) {
    const Tensor clean = random_tensor({32, 512}, at::kBFloat16, device, 1);
    const Tensor dy = random_tensor({32, 128}, at::kBFloat16, device, 3);
    const auto run = [&](double value) {
      const Parameter weight = in_fp8(random_tensor({128, 512}, at::kBFloat16, device, 2));
      const Tensor x = with_grad(clean);
      x.detach()[7][9] = value;
      WeightGradQueue queue;
      const Tensor y = linear(x, weight, queue);
      y.backward(dy);
      queue.run_all();
      return std::pair(y.detach().cpu(), weight.grad.cpu());
    };
    const auto [y, grad] = run(clean[7][9].item<double>());
    const auto [bad_y, bad_grad] = run(kNan);
    EXPECT_TRUE(bad_y[7].isnan().all().item<bool>());
    EXPECT_TRUE(bad_grad.select(1, 9).isnan().all().item<bool>());
    EXPECT_EQ(bad_y.isnan().sum().item<int64_t>(), 128);
    EXPECT_EQ(bad_grad.isnan().sum().item<int64_t>(), 128);
    const auto [far_y, far_grad] = run(1e6);
    EXPECT_TRUE(far_y.isfinite().all().item<bool>() && far_grad.isfinite().all().item<bool>());
    EXPECT_GT(far_y[7].abs().max().item<double>(), 1e5);
    EXPECT_TRUE(tensors_identical(far_y.slice(0, 8), y.slice(0, 8)));
    EXPECT_TRUE(tensors_identical(far_grad.slice(1, 10), grad.slice(1, 10)));
  }
}

// Groups of many sizes, and rows of no expert: blocks never reach into another expert.
TEST(Fp8GroupedLinear, UnevenAndEmptyGroups) {
  for (const at::Device device : test_devices()) {
    for (const bool input_major : {false, true}) {
      for (const auto& counts :
           {std::vector<int64_t>{0, 1, 15, 16, 17, 31, 33, 127, 129}, {0, 0, 300}, {700, 0, 5, 300}}) {
        const auto experts = static_cast<int64_t>(counts.size());
        const int64_t n = 272, k = input_major ? 144 : 128;
        const Tensor offsets = at::tensor(counts).cumsum(0).to(device, at::kInt);
        const int64_t real = offsets[-1].item<int64_t>(), total = real + 16;
        const Tensor x = random_tensor({total, k}, at::kBFloat16, device, 1);
        x[2][3] = 500;
        x.slice(0, real).fill_(kNan);  // of no expert
        const Tensor w = random_tensor({experts, n, k}, at::kBFloat16, device, 2);
        const Tensor dy = random_tensor({total, n}, at::kBFloat16, device, 3);
        const auto run = [&](Parameter weight, Tensor& out, Tensor& d_rows) {
          const Tensor leaf = with_grad(x);
          WeightGradQueue queue;
          weight.grad.fill_(1);  // is added to
          out = grouped_linear(leaf, weight, offsets, queue, input_major);
          out.backward(dy);
          queue.run_all();
          out = out.detach().slice(0, 0, real);
          d_rows = leaf.grad().slice(0, 0, real);
          return weight.grad - 1;
        };
        const Tensor value = input_major ? w.transpose(1, 2).contiguous() : w;
        Tensor out, d_rows, want, d_want;
        const Tensor grad = run(in_fp8(value), out, d_rows), want_grad = run(make_parameter(value), want, d_want);
        for (int64_t e = 0, begin = 0; e < experts; begin += counts[e++]) {
          if (counts[e] == 0) {
            EXPECT_TRUE(tensors_identical(grad[e], at::zeros_like(grad[e])));
            continue;
          }
          SCOPED_TRACE(
              fmt::format("{} expert {} with {} rows, input major {}", device.str(), e, counts[e], input_major));
          const auto own = [&](const Tensor& all) { return all.narrow(0, begin, counts[e]); };
          EXPECT_LE(relative_error(own(out), own(want)), 0.06);
          EXPECT_GT(relative_error(own(out), own(want)), 0.01) << "not in fp8";
          EXPECT_LE(relative_error(own(d_rows), own(d_want)), 0.05);
          EXPECT_LE(relative_error(grad[e], want_grad[e]), 0.05);
          EXPECT_GT(relative_error(grad[e], want_grad[e]), 0.01) << "not in fp8";
          // Alone the expert gives the same: no scale is shared.
          const Tensor alone = dequantize(quantize_rows(own(x).cpu().contiguous(), true, false).rows);
          const Tensor matrix = dequantize(quantize_weight(w[e].cpu().contiguous()).rows);
          EXPECT_LE(relative_error(own(out), alone.mm(matrix.t())), 4e-3);
          const auto turned = [&](const Tensor& all) { return quantized_plainly(own(all).cpu().t().contiguous(), 1); };
          const Tensor product = turned(dy).mm(turned(x).t());
          EXPECT_LE(relative_error(grad[e], input_major ? product.t() : product), 2e-3);
        }
      }
    }
  }
}

TEST(Fp8GroupedLinear, NanIsSeenInItsRowAlone) {
  for (const at::Device device : test_devices()) {
    const Parameter weight = in_fp8(random_tensor({3, 128, 256}, at::kBFloat16, device, 1));
    const Tensor rows = random_tensor({40, 256}, at::kBFloat16, device, 2);
    rows[20][200] = kNan;
    WeightGradQueue queue;
    const Tensor out = grouped_linear(rows, weight, at::tensor({17, 17, 40}, at::kInt).to(device), queue).cpu();
    EXPECT_TRUE(out[20].isnan().all().item<bool>());
    EXPECT_EQ(out.isnan().sum().item<int64_t>(), 128);
  }
}

TEST(Fp8Weight, IsMadeOnceAndAgainWhenItIsStale) {
  for (const at::Device device : test_devices()) {
    const Parameter weight = in_fp8(at::ones({32, 32}, at::device(device).dtype(at::kBFloat16)));
    const void* first = weight.fp8->of(weight.value).rows.data.data_ptr();
    EXPECT_EQ(weight.fp8->of(weight.value).rows.data.data_ptr(), first);
    const Parameter handle = weight;  // as a layer has it
    weight.value.fill_(2);
    weight.fp8->stale();
    EXPECT_TRUE(tensors_close(dequantize(handle.fp8->of(handle.value).rows), at::full({32, 32}, 2.0), 0, 0));
    EXPECT_TRUE(tensors_close(dequantize(handle.fp8->of(handle.value).transposed), at::full({32, 32}, 2.0), 0, 0));
  }
}

TEST(Fp8Wins, WithCopiesAloneAndOnGpusFromTheTablesSizesOn) {
  for (const at::Device device : test_devices()) {
    const Tensor few = at::zeros({512, 4096}, at::device(device).dtype(at::kBFloat16)), many = few.repeat({16, 1});
    Parameter weight = make_parameter(at::zeros({1, 1}, few.options()));  // of one expert
    EXPECT_FALSE(fp8_wins(weight, Fp8Product::kForward, many, 4096));
    weight.fp8 = std::make_shared<Fp8Weight>();
    EXPECT_EQ(fp8_wins(weight, Fp8Product::kForward, few, 4096), device.is_cpu());
    EXPECT_TRUE(fp8_wins(weight, Fp8Product::kForward, many, 4096));
    EXPECT_EQ(fp8_wins(weight, Fp8Product::kForward, many.to(at::kFloat), 4096), device.is_cpu());
    EXPECT_EQ(fp8_wins(weight, Fp8Product::kForward, many, 24), device.is_cpu());
    EXPECT_EQ(fp8_wins(weight, Fp8Product::kForward, many.slice(1, 0, 512).contiguous(), 4096), device.is_cpu());
    const Tensor odd = many.slice(1, 0, 31 * kFp8Block).contiguous();  // blocks not in fours
    EXPECT_EQ(fp8_wins(weight, Fp8Product::kForward, odd, 4096), device.is_cpu());
    EXPECT_TRUE(fp8_wins(weight, Fp8Product::kWeightGrad, odd, 4096));
    for (const auto product : {Fp8Product::kWeightGrad, Fp8Product::kExpertWeightGrad}) {
      EXPECT_TRUE(fp8_wins(weight, product, many, 4096));
      EXPECT_EQ(fp8_wins(weight, product, many, 24), device.is_cpu());
    }
  }
}

TEST(Fp8Wins, EachBoundOfTheTableCounts) {
  for (size_t p = 0; p < fp8_bounds().size(); ++p) {
    const auto& [name, rows, columns, elements] = fp8_bounds()[p];
    const auto product = static_cast<Fp8Product>(p);
    EXPECT_TRUE(fp8_pays(product, rows, columns, elements)) << name;
    EXPECT_FALSE(fp8_pays(product, rows - 1, columns, elements)) << name;
    EXPECT_FALSE(fp8_pays(product, rows, columns - 1, elements)) << name;
    EXPECT_FALSE(fp8_pays(product, rows, columns, elements - 1)) << name;
  }
}

TEST(Fp8Wins, WeightGradientsThatAreWanted) {
  for (const at::Device device : test_devices()) {
    const auto zeros = [&](at::IntArrayRef sizes) { return at::zeros(sizes, at::device(device).dtype(at::kBFloat16)); };
    for (Parameter weight : {make_parameter(zeros({4096, 2048})), make_parameter(zeros({1, 7168, 2048}))}) {
      const Tensor x = zeros({4096, 2048}), dy = zeros({4096, weight.value.size(-2)});
      EXPECT_FALSE(weight_grad_in_fp8(weight, x));
      weight.fp8 = std::make_shared<Fp8Weight>();
      EXPECT_TRUE(weight_grad_in_fp8(weight, x));
      EXPECT_TRUE(weight_grad_in_fp8(weight, dy));
      EXPECT_EQ(weight_grad_in_fp8(weight, x.slice(0, 0, 1024)), device.is_cpu());  // fewer than either bound
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(weight_grad_in_fp8(weight, x));
    }
    Parameter frozen = make_parameter(zeros({4096, 2048}));
    frozen.fp8 = std::make_shared<Fp8Weight>();
    frozen.grad = Tensor();
    EXPECT_FALSE(weight_grad_in_fp8(frozen, zeros({4096, 2048})));
    EXPECT_FALSE(weight_grad_in_fp8({}, zeros({4096, 2048})));
  }
}

}  // namespace
}  // namespace marrow
