#include "ops/rows.h"

#include "ops/op_test_support.h"

namespace marrow {
namespace {

using at::Tensor;

// Random experts; `holes` turns some of them to -1 or an id outside the range.
Tensor random_experts(int64_t tokens, int64_t top_k, int64_t experts, bool holes) {
  const Tensor noise = random_tensor({tokens, top_k}, at::kFloat, at::kCPU, tokens + top_k);
  Tensor ids = (noise.abs() * 1e4).to(at::kLong) % experts;
  if (holes) {
    ids.masked_fill_(noise > 0.8, -1);
    ids.masked_fill_(noise < -1.2, experts);
  }
  return ids.to(at::kInt);
}

struct Shape {
  int64_t tokens, top_k, experts;
  bool holes;
};

const std::vector<Shape> kShapes = {{0, 2, 4, false},      {1, 1, 1, false},    {1, 2, 8, false},
                                    {7, 3, 5, true},       {513, 4, 16, false}, {1031, 8, 128, true},
                                    {3000, 2, 1000, true}, {64, 1, 64, false},  {37, 40, 64, true}};

TEST(ExpertPermutation, IsAStableSort) {
  for (const at::Device device : test_devices()) {
    for (const Shape& s : kShapes) {
      SCOPED_TRACE(fmt::format("{} T={} k={} E={}", device.str(), s.tokens, s.top_k, s.experts));
      const Tensor experts = random_experts(s.tokens, s.top_k, s.experts, s.holes);
      const ExpertPermutation got = expert_permutation(experts.to(device), s.experts);
      // Plain: invalid pairs sort last, by a stable sort.
      const Tensor flat = experts.flatten().to(at::kLong);
      const Tensor valid = (flat >= 0).logical_and(flat < s.experts);
      const Tensor keys = at::where(valid, flat, s.experts);
      const auto [sorted, order] = keys.sort(true, 0, false);
      const int64_t rows = valid.sum().item<int64_t>();
      Tensor slots = order.to(at::kInt), sources = order.div(s.top_k, "floor").to(at::kInt);
      slots.slice(0, rows).fill_(-1);
      sources.slice(0, rows).fill_(-1);
      Tensor rows_of_source = at::full({s.tokens * s.top_k}, -1, at::kInt);
      rows_of_source.index_put_({order.slice(0, 0, rows)}, at::arange(rows, at::kInt));
      const Tensor ends = at::bincount(keys, {}, s.experts + 1).slice(0, 0, s.experts).cumsum(0).to(at::kInt);
      EXPECT_TRUE(tensors_identical(got.offsets, ends));
      EXPECT_TRUE(tensors_identical(got.slot_of_row, slots));
      EXPECT_TRUE(tensors_identical(got.map.source_of_row, sources));
      EXPECT_TRUE(tensors_identical(got.map.rows_of_source, rows_of_source.view({s.tokens, s.top_k})));
    }
  }
}

TEST(RankPermutation, HasOneRowForEachTokenAndRank) {
  for (const at::Device device : test_devices()) {
    for (const Shape& s : kShapes) {
      for (const int64_t each : {1, 2, 16}) {
        SCOPED_TRACE(fmt::format("{} T={} k={} E={} each={}", device.str(), s.tokens, s.top_k, s.experts, each));
        const Tensor experts = random_experts(s.tokens, s.top_k, s.experts, s.holes);
        const int64_t ranks = s.experts / each;
        if (ranks == 0) continue;
        const ExpertPermutation got = rank_permutation(experts.to(device), ranks, each);
        std::vector<std::vector<int32_t>> rows_of_rank(ranks);  // pairs
        for (int64_t t = 0; t < s.tokens; ++t) {
          std::vector<bool> seen(ranks, false);
          for (int64_t j = 0; j < s.top_k; ++j) {
            const int64_t expert = experts[t][j].item<int32_t>(), rank = expert / each;
            if (expert < 0 || rank >= ranks || (each > 1 && seen[rank])) continue;
            seen[rank] = true;
            rows_of_rank[rank].push_back(static_cast<int32_t>(t * s.top_k + j));
          }
        }
        std::vector<int32_t> ends, slots, rows(s.tokens * s.top_k, -1);
        for (const auto& pairs : rows_of_rank) {
          for (const int32_t pair : pairs) {
            rows[pair] = static_cast<int32_t>(slots.size());
            slots.push_back(pair);
          }
          ends.push_back(static_cast<int32_t>(slots.size()));
        }
        slots.resize(rows.size(), -1);
        EXPECT_TRUE(tensors_identical(got.offsets, at::tensor(ends, at::kInt)));
        EXPECT_TRUE(tensors_identical(got.slot_of_row, at::tensor(slots, at::kInt)));
        EXPECT_TRUE(tensors_identical(got.map.rows_of_source, at::tensor(rows, at::kInt).view({s.tokens, s.top_k})));
        for (int32_t& slot : slots) slot = slot < 0 ? -1 : slot / static_cast<int32_t>(s.top_k);
        EXPECT_TRUE(tensors_identical(got.map.source_of_row, at::tensor(slots, at::kInt)));
      }
    }
  }
}

TEST(Rows, GatherAndSumMatchIndexing) {
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const Shape& s : kShapes) {
        for (const int64_t width : {1, 7, 8, 40, 264}) {
          if (s.tokens > 1000 && width > 8) continue;
          SCOPED_TRACE(fmt::format("{} {} T={} k={} E={} H={}", device.str(), c10::toString(dtype), s.tokens, s.top_k,
                                   s.experts, width));
          const ExpertPermutation permutation =
              expert_permutation(random_experts(s.tokens, s.top_k, s.experts, s.holes).to(device), s.experts);
          const RowMap& map = permutation.map;
          const int64_t rows = s.tokens * s.top_k;
          const Tensor x = with_grad(random_tensor({s.tokens, width}, dtype, device, 1));
          const Tensor y = with_grad(random_tensor({rows, width}, dtype, device, 2));
          const Tensor residual = with_grad(random_tensor({s.tokens, width}, dtype, device, 3));
          const Tensor d_gathered = random_tensor({rows, width}, dtype, device, 4);
          const Tensor d_summed = random_tensor({s.tokens, width}, dtype, device, 5);
          const Tensor gathered = gather_rows(x, map, rows);
          const int64_t real =
              s.tokens == 0 ? 0 : permutation.offsets[-1].item<int64_t>();  // by offsets no others exist
          const Tensor bounded = gather_rows(x.detach(), map, rows, permutation.offsets);
          EXPECT_TRUE(tensors_identical(bounded.narrow(0, 0, real), gathered.detach().narrow(0, 0, real)));
          const Tensor summed = sum_rows(y, map, residual);
          gathered.backward(d_gathered);
          summed.backward(d_summed);

          // The map as a 0/1 matrix [R, T].
          const Tensor source = map.source_of_row.cpu().to(at::kLong);
          const Tensor present = (source >= 0).to(at::kDouble).unsqueeze(1);
          const auto pick = [&](const Tensor& from) {  // rows of tokens
            return from.index_select(0, source.clamp_min(0)) * present;
          };
          const auto add = [&](const Tensor& from) {  // tokens of rows
            Tensor out = at::zeros({s.tokens, width}, at::kDouble);
            return out.index_add(0, source.clamp_min(0), from * present);
          };
          const auto plain = [](const Tensor& t) { return t.detach().cpu().to(at::kDouble); };
          const double rounding = dtype == at::kFloat ? std::max(1e-6, 1e-7 * static_cast<double>(s.top_k)) : 4e-3;
          if (s.tokens > 0) {
            EXPECT_TRUE(tensors_close(gathered, pick(plain(x)), 0, 0));
            EXPECT_TRUE(tensors_close(x.grad(), add(plain(d_gathered)), rounding, rounding));
            EXPECT_TRUE(tensors_close(summed, add(plain(y)) + plain(residual), rounding, rounding));
            EXPECT_TRUE(tensors_close(y.grad(), pick(plain(d_summed)), 0, 0));
          }
          EXPECT_TRUE(tensors_identical(residual.grad(), d_summed));
        }
      }
    }
  }
}

TEST(Rows, SumWithoutResidualAndValues) {
  for (const at::Device device : test_devices()) {
    const ExpertPermutation permutation = expert_permutation(random_experts(37, 3, 6, true).to(device), 6);
    const Tensor ones = at::ones({111, 5}, device);
    const Tensor expected = (permutation.map.rows_of_source >= 0).sum(1, true).expand({37, 5});
    EXPECT_TRUE(tensors_close(sum_rows(ones, permutation.map, {}), expected, 0, 0));

    const Tensor weights = with_grad(random_tensor({37, 3}, at::kFloat, device, 9));
    const Tensor values = gather_values(weights, permutation, 111);
    const int64_t real = permutation.offsets[-1].item<int64_t>();
    EXPECT_TRUE(
        tensors_identical(gather_values(weights.detach(), permutation, real), values.detach().narrow(0, 0, real)));
    const Tensor slots = permutation.slot_of_row.to(at::kLong), present = slots >= 0;
    const Tensor picked = weights.detach().flatten().index_select(0, slots.clamp_min(0));
    EXPECT_TRUE(tensors_identical(values, picked * present));
    const Tensor d = random_tensor({111}, at::kFloat, device, 10);
    values.backward(d);
    Tensor d_weights = at::zeros({111}, d.options());
    d_weights.index_put_({slots.masked_select(present)}, d.masked_select(present));
    EXPECT_TRUE(tensors_identical(weights.grad(), d_weights.view({37, 3})));
  }
}

TEST(Rows, RefusesWhatDoesNotFit) {
  const ExpertPermutation permutation = expert_permutation(at::zeros({4, 2}, at::kInt), 3);
  EXPECT_THROW(gather_rows(at::ones({4, 3}), permutation.map, 9), Error);
  EXPECT_THROW(gather_rows(at::ones({5, 3}), permutation.map, 8, permutation.offsets), Error);
  EXPECT_THROW(sum_rows(at::ones({8, 3}), permutation.map, at::ones({5, 3})), Error);
  EXPECT_THROW(expert_permutation(at::zeros({4, 2}), 3), Error);
  EXPECT_THROW(expert_permutation(at::zeros({4, 2}, at::kInt), 2000), Error);
}

// Just above and just below 2^31 elements. Eight (four) equal addends make an exact sum in bf16.
TEST(SlowRows, MoreElementsThan32Bits) {
  struct Big {
    int64_t hidden, top_k, tokens;
  };
  for (const at::Device device : test_devices()) {
    for (const Big& big : {Big{2048, 8, 131'073}, Big{2880, 4, 186'414}}) {
      const int64_t rows = big.tokens * big.top_k;
      const Tensor pattern = random_tensor({4099, big.hidden}, at::kBFloat16, device, 1);
      const Tensor x = pattern.repeat({(big.tokens + 4098) / 4099, 1}).slice(0, 0, big.tokens).contiguous();
      const Tensor experts = (at::arange(rows, at::kInt) % 61).view({-1, big.top_k}).to(device);
      const ExpertPermutation permutation = expert_permutation(experts, 61);
      const Tensor gathered = gather_rows(x, permutation.map, rows, big.top_k == 8 ? permutation.offsets : Tensor());
      for (const int64_t row : {int64_t{0}, rows / 2, rows - 1}) {
        const int64_t token = permutation.map.source_of_row[row].item<int64_t>();
        EXPECT_TRUE(at::equal(gathered[row], x[token])) << "row " << row;
      }
      const Tensor summed = sum_rows(gathered, permutation.map, {});
      EXPECT_TRUE(at::equal(summed, x * static_cast<double>(big.top_k)));
    }
  }
}

}  // namespace
}  // namespace marrow
