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

// `rows` of a dense product, or on average of an expert (as uneven as routers choose), summing over `inner`.
inline Fp8Times time_product(Fp8Product product, int64_t rows, int64_t inner, int64_t outer) {
  const Sizes s = sizes();
  const at::NoGradGuard no_grad;
  const auto time = [](const Body& body) {
    body();
    return seconds_of(body) / kRepeats * 1e6;
  };
  if (product == Fp8Product::kExpertForward || product == Fp8Product::kExpertInputGrad) {
    Sizes few = s;
    few.experts = s.device.is_cuda() ? 32 : 4;
    few.top_k = 1;
    few.sequences = 1;
    few.seq_len = rows * few.experts;
    const bool back = product == Fp8Product::kExpertInputGrad;  // as by a weight that is stored the other way round
    const at::Tensor x = s.random({few.tokens(), inner});
    const at::Tensor offsets = expert_permutation(choose_experts(few, false), few.experts).offsets;
    Parameter weight{"weight", s.random({few.experts, back ? inner : outer, back ? outer : inner}), {}};
    WeightGradQueue queue;
    const auto run = [&] { grouped_linear(x, weight, offsets, queue, back); };
    const double bf16 = time(run), quantising = time([&] { quantize_expert_rows(x, offsets); });
    weight.fp8 = std::make_shared<Fp8Weight>(/*at_any_size=*/true);
    return {bf16, time(run) - quantising, quantising};
  }
  const at::Tensor x = s.random({rows, inner}), w = s.random({outer, inner});
  if (product == Fp8Product::kWeightGrad) {  // [outer, inner], over rows
    const at::Tensor dy = s.random({rows, outer}), grad = at::zeros({outer, inner}, at::device(s.device));
    const Fp8Pair x8 = quantize_rows(x, true, true), dy8 = quantize_rows(dy, true, true);
    return {time([&] { accumulate_weight_grad(grad, dy, x); }),
            time([&] { at::Tensor(grad).add_(fp8_product(dy8.transposed, x8.transposed, at::kFloat)); }),
            time([&] { quantize_rows(x, true, true), quantize_rows(dy, true, true); }) -
                time([&] { quantize_rows(x, true, false), quantize_rows(dy, true, false); })};
  }
  const at::Tensor turned = w.t().contiguous();
  const Fp8Matrix x8 = quantize_rows(x, true, false).rows, w8 = quantize_weight(w).rows;
  const bool back = product == Fp8Product::kInputGrad;
  return {time([&] { back ? at::mm(x, turned) : at::mm(x, w.t()); }), time([&] { fp8_product(x8, w8, s.dtype); }),
          time([&] { quantize_rows(x, true, false); })};
}

// The ladder of sizes for each product, and the least rows and columns from which on fp8 with quantising won
// everywhere.
inline int print_fp8_bounds() {
  const auto begin = std::chrono::steady_clock::now();
  const bool gpu = sizes().device.is_cuda();
  using Ladder = std::vector<int64_t>;
  const Ladder dense = gpu ? Ladder{1024, 2048, 4096, 8192, 16384} : Ladder{16, 32};
  const Ladder each = gpu ? Ladder{64, 128, 256, 512, 1024, 2048} : Ladder{8, 16};
  const Ladder columns = gpu ? Ladder{512, 1024, 1536, 2048, 4096, 7168} : Ladder{64, 128};
  const Ladder inners = gpu ? Ladder{2048, 7168} : Ladder{128};
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
    const bool grouped = product == Fp8Product::kExpertForward || product == Fp8Product::kExpertInputGrad;
    Pairs shapes;
    for (const auto& [inner, outer] : experts) {
      if (grouped)
        shapes.emplace_back(product == Fp8Product::kExpertForward ? inner : outer,
                            product == Fp8Product::kExpertForward ? outer : inner);
    }
    for (const int64_t inner : inners) {
      for (const int64_t outer : columns) {
        if (!grouped) shapes.emplace_back(inner, outer);
      }
    }
    const Ladder& ladder = grouped ? each : dense;
    std::map<std::pair<int64_t, int64_t>, double> least;  // gain by (rows, columns), of any inner size
    for (const auto& [inner, outer] : shapes) {
      fmt::print("| {} | {} | {} |", fp8_bounds()[p].product, inner, outer);
      for (const int64_t rows : ladder) {
        const Fp8Times t = time_product(product, rows, inner, outer);
        const double gain = t.bf16 / (t.fp8 + t.quantising);
        const auto [at, first] = least.emplace(std::pair(rows, outer), gain);
        at->second = std::min(at->second, gain);
        fmt::print(" {}: {:.0f} / {:.0f} + {:.0f} = {:.2f};", rows, t.bf16, t.fp8, t.quantising, gain);
      }
      fmt::print(" |\n");
    }
    // The pair that lets most sizes be in fp8 of those that let none lose.
    int64_t best_rows = 0, best_outer = 0;
    size_t most = 0;
    for (const auto& [corner, unused] : least) {
      (void)unused;
      size_t inside = 0;
      bool wins = true;
      for (const auto& [size, gain] : least) {
        if (size.first < corner.first || size.second < corner.second) continue;
        wins = wins && gain > 1;
        ++inside;
      }
      if (wins && inside > most)
        std::tie(most, best_rows, best_outer) = std::tuple(inside, corner.first, corner.second);
    }
    bounds += most == 0 ? fmt::format("  {}: never won\n", fp8_bounds()[p].product)
                        : fmt::format("  {{\"{}\", {}, {}}}\n", fp8_bounds()[p].product, best_rows, best_outer);
  }
  fmt::print("fp8_bounds() as measured (product, least rows, least columns), in {:.0f} s:\n{}",
             std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), bounds);
  return 0;
}

}  // namespace marrow
