// The kernels of bench/nvlink_dispatch.cu, all ranks of a host in this process: layers one after the other through the
// same windows, against a sort.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "parallel/resident_blocks.h"
// After what stands for CUDA:
#include "../bench/nvlink_kernels.cuh"

namespace marrow::nvlink {
namespace {

using test::Launch;

struct Case {
  int ranks;
  int64_t tokens, top_k, experts, width;  // of bf16 values
  int64_t from, among;                    // choices are among so many experts, beginning at `from`
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.ranks << " ranks, " << c.tokens << " tokens, top " << c.top_k << " of " << c.experts << ", width "
       << c.width << ", experts " << c.from << " to " << c.from + c.among;
}

float to_float(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }
uint16_t to_bits(float value) { return static_cast<uint16_t>(to_bf16(value, 0)); }

constexpr uint32_t kFirstEpoch = 0xffffffffu - 3 * kEpochsPerLaunch + 1;  // goes round soon

struct Pair {
  int expert, rank;
  int64_t token, choice;
  auto operator<=>(const Pair&) const = default;
};

// One layer's tokens and choices on every rank, and what must become of them.
struct Layer {
  std::vector<std::vector<int32_t>> choices;  // [ranks][T, k], each expert once a token; some are -1
  std::vector<std::vector<float>> weights;
  using Values = std::vector<std::vector<uint16_t>>;  // [ranks][T, H]
  Values tokens, gradients;                           // forward, backward

  Layer(const Case& c, std::mt19937& random) {
    for (int r = 0; r < c.ranks; ++r) {
      std::vector<int32_t> order(static_cast<size_t>(c.among));
      std::iota(order.begin(), order.end(), static_cast<int32_t>(c.from));
      choices.emplace_back();
      for (int64_t t = 0; t < c.tokens; ++t) {
        std::shuffle(order.begin(), order.end(), random);
        for (int64_t j = 0; j < c.top_k; ++j) choices.back().push_back(random() % 16 == 0 ? -1 : order[j]);
      }
      weights.emplace_back(choices.back().size());
      for (float& weight : weights.back()) weight = static_cast<float>(random() % 1000);
      for (Values* values : {&tokens, &gradients}) {
        values->emplace_back(static_cast<size_t>(c.tokens * c.width));
        for (uint16_t& value : values->back()) value = to_bits(static_cast<float>(random() % 4096) - 2048);
      }
    }
  }
  std::vector<Pair> rows_of(const Case& c, int rank) const {
    std::vector<Pair> pairs;
    const auto own = static_cast<int>(c.experts) / c.ranks;
    for (int s = 0; s < c.ranks; ++s) {
      for (int64_t i = 0; i < c.tokens * c.top_k; ++i) {
        const int expert = choices[s][i];
        if (expert >= 0 && expert / own == rank) pairs.push_back({expert, s, i / c.top_k, i % c.top_k});
      }
    }
    std::sort(pairs.begin(), pairs.end());
    return pairs;
  }
};

uint16_t through_expert(uint16_t value, int expert) {
  return to_bits(to_float(value) * static_cast<float>(1 + expert));
}

// A rank's memory, and its part of the work.
struct Rank {
  Exchange x;
  std::vector<uint4> window;
  std::vector<char> rows;
  std::vector<float> row_weights;
  std::vector<int32_t> offsets, rows_of_token;
  int wrong = 0;

  Rank(const Case& c, int rank, StuckReport& stuck) {
    x.rank = rank;
    x.ranks = c.ranks;
    x.tokens = c.tokens;
    x.top_k = c.top_k;
    x.experts = c.experts;
    x.row_bytes = c.width * 2;
    x.stuck = &stuck;
    x.patience = 3'000'000;  // turns of fibres
    x.lay_out();
    window.resize(static_cast<size_t>(x.bytes / 16));
    std::fill_n(reinterpret_cast<uint32_t*>(window.data()) + x.flags / 4, c.ranks * kMaxBlocks, kFirstEpoch);
    rows.resize(static_cast<size_t>(c.ranks * c.tokens * c.top_k * x.row_bytes));
    row_weights.resize(static_cast<size_t>(c.ranks * c.tokens * c.top_k));
    offsets.resize(static_cast<size_t>(c.experts / c.ranks));
    rows_of_token.resize(static_cast<size_t>(c.tokens * c.ranks));
  }
  char* own(int64_t offset) { return x.windows[x.rank] + offset; }
  Plan plan(const Layer& layer) {
    return {layer.choices[x.rank].data(), layer.weights[x.rank].data(), offsets.data(), rows_of_token.data()};
  }
  // Compares, and lets the experts work.
  void check_rows(const Case& c, const Layer& layer, const Layer::Values& values) {
    const std::vector<Pair> pairs = layer.rows_of(c, x.rank);
    auto* row = reinterpret_cast<uint16_t*>(rows.data());
    std::vector<int32_t> ends(offsets.size(), 0);
    for (size_t i = 0; i < pairs.size(); ++i, row += c.width) {
      const auto& [expert, rank, token, choice] = pairs[i];
      const uint16_t* expected = values[rank].data() + token * c.width;
      wrong += !std::equal(row, row + c.width, expected);
      wrong += row_weights[i] != layer.weights[rank][token * c.top_k + choice];
      for (int64_t h = 0; h < c.width; ++h) row[h] = through_expert(row[h], expert);
      ++ends[static_cast<size_t>(expert) % ends.size()];
    }
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    wrong += ends != offsets;
    for (const char *end = rows.data() + rows.size(), *p = reinterpret_cast<char*>(row); p < end; ++p)
      wrong += *p != -1;
  }
  void check_partials(const Case& c, const Layer& layer, const Layer::Values& values) {
    const auto own_experts = static_cast<int>(c.experts) / c.ranks;
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int r = 0; r < c.ranks; ++r) {
        std::vector<float> sums(static_cast<size_t>(c.width), 0.0f);
        bool any = false;
        for (int64_t j = 0; j < c.top_k; ++j) {
          const int expert = layer.choices[x.rank][t * c.top_k + j];
          if (expert < 0 || expert / own_experts != r) continue;
          any = true;
          const uint16_t* token = values[x.rank].data() + t * c.width;
          for (int64_t h = 0; h < c.width; ++h) sums[h] += to_float(through_expert(token[h], expert));
        }
        const int32_t at = rows_of_token[t * c.ranks + r];
        wrong += at != (any ? static_cast<int32_t>(r * c.tokens + t) : -1);
        if (!any || at < 0) continue;
        const auto* partial = reinterpret_cast<const uint16_t*>(own(x.partials)) + at * c.width;
        for (int64_t h = 0; h < c.width; ++h) wrong += partial[h] != to_bits(sums[h]);
      }
    }
  }

  // Layers forth and back, in the ways that there are; every launch has another number of blocks. Nothing but the
  // kernels' own meetings keeps a rank from being ahead of the others, and from writing what they still read.
  std::vector<Launch> stream(const Case& c, const std::vector<Layer>& layers) {
    std::vector<Launch> launches;
    uint32_t epoch = kFirstEpoch;
    const auto launch = [&](int shared_ints, auto kernel) {
      const unsigned blocks = 1 + epoch / kEpochsPerLaunch % 3;
      launches.push_back({blocks, 64, shared_ints, [kernel, at = epoch](int* shared) { kernel(at, shared); }});
      epoch += kEpochsPerLaunch;
    };
    const auto on_host = [&](std::function<void()> body) {
      launches.push_back({1, 32, 0, [body = std::move(body)](int*) {
                            if (threadIdx.x == 0) body();
                          }});
    };
    const auto put = [&](const Layer::Values& values) {
      on_host([&values, this] { std::memcpy(own(x.own_tokens), values[x.rank].data(), values[x.rank].size() * 2); });
    };
    const auto forget = [&] {
      on_host([this] {
        std::fill(rows.begin(), rows.end(), char{-1});
        std::fill(row_weights.begin(), row_weights.end(), -1.0f);
      });
    };
    const auto pull = [&](const Layer& layer, const Layer::Values& values) {
      forget();
      put(values);
      launch(0, [this](uint32_t at, int*) { spread_rows<true>(x, at, nullptr, rows.data(), row_weights.data()); });
      on_host([this] { std::fill_n(own(x.own_tokens), x.tokens * x.row_bytes, char{-1}); });
      on_host([&layer, &values, c, this] { check_rows(c, layer, values); });
    };
    const auto push = [&](const Layer& layer, const Layer::Values& values) {
      const auto* tokens = reinterpret_cast<const char*>(values[x.rank].data());
      forget();
      launch(0, [&layer, tokens, this](uint32_t at, int*) { push_rows(x, at, plan(layer).choices, tokens); });
      launch(0, [tokens, this](uint32_t, int*) { spread_rows<false>(x, 0, tokens, rows.data(), row_weights.data()); });
      on_host([&layer, &values, c, this] { check_rows(c, layer, values); });
    };
    const auto combine = [&](const Layer& layer, const Layer::Values& values) {
      launch(0, [this](uint32_t at, int*) { combine_rows(x, at, rows.data()); });
      on_host([&layer, &values, c, this] { check_partials(c, layer, values); });
    };
    const int ints = plan_shared_ints(c.experts);
    for (const Layer& layer : layers) {
      if (&layer - layers.data() == 1) {
        forget();
        put(layer.tokens);
        launch(ints, [&layer, this](uint32_t at, int* shared) {
          make_plan(x, at, plan(layer), shared);
          spread_rows<true>(x, at + 2, nullptr, rows.data(), row_weights.data());
        });
        on_host([&layer, c, this] { check_rows(c, layer, layer.tokens); });
        combine(layer, layer.tokens);
        continue;
      }
      launch(ints, [&layer, this](uint32_t at, int* shared) { make_plan(x, at, plan(layer), shared); });
      pull(layer, layer.gradients);
      pull(layer, layer.tokens);
      combine(layer, layer.tokens);
      push(layer, layer.tokens);
      push(layer, layer.gradients);
      combine(layer, layer.gradients);
      on_host([this] { std::fill(rows.begin(), rows.end(), char{0}); });
      launch(0, [this](uint32_t at, int*) { combine_rows(x, at, rows.data()); });
    }
    return launches;
  }
};

struct Host {
  StuckReport stuck{};
  std::vector<std::unique_ptr<Rank>> ranks;
  explicit Host(const Case& c) {
    for (int r = 0; r < c.ranks; ++r) ranks.push_back(std::make_unique<Rank>(c, r, stuck));
    for (auto& rank : ranks) {
      for (int r = 0; r < c.ranks; ++r) rank->x.windows[r] = reinterpret_cast<char*>(ranks[r]->window.data());
    }
  }
};

TEST(NvlinkDispatch, EqualsASortInAnyOrderOfRanksAndBlocks) {
  constexpr int64_t kWide = 8 * 32 * kInFlight + 24;  // more than a warp has in flight
  const std::vector<Case> cases = {{1, 7, 3, 8, 16, 0, 8}, {2, 41, 8, 16, 24, 0, 16},   {2, 9, 8, 128, kWide, 0, 128},
                                   {2, 5, 1, 2, 8, 0, 1},  {4, 19, 4, 64, 520, 16, 16}, {8, 9, 8, 128, 16, 0, 128},
                                   {8, 1, 8, 8, 8, 0, 8},  {3, 21, 2, 12, 48, 4, 7}};
  unsigned seed = 0;
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::PrintToString(c));
    std::mt19937 random(++seed);
    std::vector<Layer> layers;
    for (int i = 0; i < 3; ++i) layers.emplace_back(c, random);
    Host host(c);
    std::vector<std::vector<Launch>> streams;
    for (auto& rank : host.ranks) streams.push_back(rank->stream(c, layers));
    ASSERT_TRUE(test::run_streams(streams, seed)) << "rank " << host.stuck.rank << " waits for " << host.stuck.for_rank;
    for (const auto& rank : host.ranks) EXPECT_EQ(rank->wrong, 0) << "rank " << rank->x.rank;
  }
}

// A rank that does not come ends the others, which say whom they waited for.
TEST(NvlinkDispatch, GivesUpOnARankThatIsNotThere) {
  const Case c{2, 5, 2, 4, 8, 0, 4};
  std::mt19937 random(1);
  const std::vector<Layer> layers{Layer(c, random)};
  Host host(c);
  std::vector<std::vector<Launch>> streams;
  for (auto& rank : host.ranks) {
    rank->x.patience = 20'000;
    streams.push_back(rank->stream(c, layers));
  }
  streams[1].resize(1);
  EXPECT_FALSE(test::run_streams(streams, 1));
  EXPECT_EQ(host.stuck.stuck, 1);
  EXPECT_EQ(host.stuck.rank, 0);
  EXPECT_EQ(host.stuck.for_rank, 1);
}

}  // namespace
}  // namespace marrow::nvlink
