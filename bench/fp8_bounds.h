// From which sizes on products are faster in fp8, measured: `bench_ops fp8_bounds`.
#pragma once
#include "measure.h"
// After the precompiled header:
#include "ops/expert_rows.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/rows.h"

namespace marrow {

// A product's time in bf16, in fp8, and that of quantising what it reads, in microseconds.
struct Fp8Times {
  double bf16, fp8, quantising;
};

// `rows` of a dense product, or on average of an expert (as uneven as routers choose), summing over `inner`; of a
// weight gradient [outer, inner].
inline Fp8Times time_product(Fp8Product product, int64_t rows, int64_t inner, int64_t outer) {
  const Sizes s = sizes();
  const at::NoGradGuard no_grad;
  const auto time = [](const Body& body) {
    body();
    return seconds_of(body) / kRepeats * 1e6;
  };
  if (product >= Fp8Product::kExpertForward) {
    Sizes few = s;
    few.experts = s.device.is_cuda() ? 32 : 4;
    few.top_k = 1;
    few.sequences = 1;
    few.seq_len = rows * few.experts;
    const bool back = product == Fp8Product::kExpertInputGrad;  // as by a weight that is stored the other way round
    const at::Tensor x = s.random({few.tokens(), inner});
    const at::Tensor offsets = expert_permutation(choose_experts(few, false), few.experts).offsets;
    const auto quantise = [&](const at::Tensor& of, bool direct, bool turned) {
      return time([&] { quantize_expert_rows(of, offsets, direct, turned); });
    };
    if (product == Fp8Product::kExpertWeightGrad) {
      const at::Tensor dy = s.random({few.tokens(), outer});
      const at::Tensor grad = at::zeros({few.experts, outer, inner}, at::device(s.device));
      const Fp8Matrix x8 = quantize_expert_rows(x, offsets, false, true).transposed;
      const Fp8Matrix dy8 = quantize_expert_rows(dy, offsets, false, true).transposed;
      return {
          time([&] { grouped_weight_grad(grad, dy, x, offsets); }),
          time([&] { grouped_fp8_weight_grad(grad, dy8, x8, offsets); }),
          quantise(x, true, true) - quantise(x, true, false) + quantise(dy, true, true) - quantise(dy, true, false)};
    }
    Parameter weight{"weight", s.random({few.experts, back ? inner : outer, back ? outer : inner}), {}};
    WeightGradQueue queue;
    const auto run = [&] { grouped_linear(x, weight, offsets, queue, back); };
    const double bf16 = time(run), quantising = quantise(x, true, false);
    weight.fp8 = std::make_shared<Fp8Weight>(/*at_any_size=*/true);
    // Whoever makes the rows writes their form too, one of the three bytes that quantising alone moves.
    return {bf16, time(run) - quantising, quantising / 3};
  }
  const at::Tensor x = s.random({rows, inner}), w = s.random({outer, inner});
  if (product == Fp8Product::kWeightGrad) {  // [outer, inner], over rows
    const at::Tensor dy = s.random({rows, outer}), grad = at::zeros({outer, inner}, at::device(s.device));
    const Fp8Pair x8 = quantize_rows(x, true, true), dy8 = quantize_rows(dy, true, true);
    return {time([&] { accumulate_weight_grad(grad, dy, x); }),
            time([&] { accumulate_fp8(grad, dy8.transposed, x8.transposed); }),
            time([&] { quantize_rows(x, true, true), quantize_rows(dy, true, true); }) -
                time([&] { quantize_rows(x, true, false), quantize_rows(dy, true, false); })};
  }
  const at::Tensor turned = w.t().contiguous();
  const Fp8Matrix x8 = quantize_rows(x, true, false).rows, w8 = quantize_weight(w).rows;
  const bool back = product == Fp8Product::kInputGrad;
  return {time([&] { back ? at::mm(x, turned) : at::mm(x, w.t()); }), time([&] { fp8_product(x8, w8, s.dtype); }),
          time([&] { quantize_rows(x, true, false); })};
}

using ProductSize = std::array<int64_t, 3>;  // rows, columns (of a weight gradient 0), elements of the weight

// The corner that lets most sizes be in fp8 of those that let none lose.
inline std::string describe_bound(const char* product, const std::map<ProductSize, double>& gains) {
  std::set<int64_t> of[3];
  for (const auto& [size, unused] : gains) {
    for (size_t i = 0; i < 3; ++i) of[i].insert(size[i]);
  }
  ProductSize best{};
  int64_t most = 0;
  const auto won_from = [&](const ProductSize& corner) {
    int64_t won = 0;
    for (const auto& [size, gain] : gains) {
      const bool inside = size[0] >= corner[0] && size[1] >= corner[1] && size[2] >= corner[2];
      if (inside) won = gain > 1 && won >= 0 ? won + 1 : -1;
    }
    return won;
  };
  for (const int64_t rows : of[0]) {
    for (const int64_t columns : of[1]) {
      for (const int64_t elements : of[2]) {
        const int64_t won = won_from({rows, columns, elements});
        if (won > most) std::tie(most, best) = std::tuple(won, ProductSize{rows, columns, elements});
      }
    }
  }
  return most == 0 ? fmt::format("  {}: never won\n", product)
                   : fmt::format("  {{\"{}\", {}, {}, {}}}\n", product, best[0], best[1], best[2]);
}

// The ladder of sizes for each product, and the least sizes from which on fp8 with quantising won everywhere.
inline int print_fp8_bounds() {
  const auto begin = std::chrono::steady_clock::now();
  const bool gpu = sizes().device.is_cuda();
  using Ladder = std::vector<int64_t>;
  const Ladder dense = gpu ? Ladder{1024, 2048, 4096, 8192, 16384} : Ladder{16, 32};
  const Ladder each = gpu ? Ladder{64, 128, 256, 512, 1024, 2048, 4096} : Ladder{8, 16};
  const Ladder columns = gpu ? Ladder{512, 1024, 1536, 2048, 4096, 7168} : Ladder{64, 128};
  const Ladder inners = gpu ? Ladder{512, 1536, 2048, 7168} : Ladder{128};
  using Pairs =
      std::vector<std::pair<int64_t, int64_t>>;  // inner, outer of gate_up and down: 30B-A3B, V3, and one small
  const Pairs experts =
      gpu ? Pairs{{2048, 1536}, {768, 2048}, {7168, 4096}, {2048, 7168}, {2048, 512}} : Pairs{{64, 128}};
  fmt::print(
      "us in bf16 / in fp8 + quantising = gain\n| product | summed over | columns | rows: as below "
      "|\n|---|---|---|---|\n");
  std::string bounds;
  for (size_t p = 0; p < fp8_bounds().size(); ++p) {
    const auto product = static_cast<Fp8Product>(p);
    const bool grouped = product >= Fp8Product::kExpertForward, back = product == Fp8Product::kExpertInputGrad;
    Pairs shapes;
    for (const auto& [inner, outer] : experts) {
      if (grouped) shapes.emplace_back(back ? outer : inner, back ? inner : outer);
    }
    for (const int64_t inner : inners) {
      for (const int64_t outer : columns) {
        if (!grouped) shapes.emplace_back(inner, outer);
      }
    }
    const bool weight_grad = product == Fp8Product::kWeightGrad || product == Fp8Product::kExpertWeightGrad;
    std::map<ProductSize, double> gains;
    for (const auto& [inner, outer] : shapes) {
      fmt::print("| {} | {} | {} |", fp8_bounds()[p].product, inner, outer);
      for (const int64_t rows : grouped ? each : dense) {
        const Fp8Times t = time_product(product, rows, inner, outer);
        const double gain = t.bf16 / (t.fp8 + t.quantising);
        const auto [at, first] = gains.emplace(ProductSize{rows, weight_grad ? 0 : outer, outer * inner}, gain);
        at->second = std::min(at->second, gain);
        fmt::print(" {}: {:.0f} / {:.0f} + {:.0f} = {:.2f};", rows, t.bf16, t.fp8, t.quantising, gain);
      }
      fmt::print(" |\n");
    }
    bounds += describe_bound(fp8_bounds()[p].product, gains);
  }
  fmt::print("fp8_bounds() as measured, the least sizes, in {:.0f} s:\n{}",
             std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), bounds);
  return 0;
}

}  // namespace marrow
