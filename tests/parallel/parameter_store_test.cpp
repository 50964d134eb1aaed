#include "parallel/parameter_store.h"

#include "parallel/mesh_ranks.h"

namespace marrow::test {
namespace {

constexpr int64_t kExperts = 8;

ParameterSpec spec_of(std::string name, std::vector<int64_t> shape, std::vector<HubTensor> parts) {
  ParameterSpec spec;
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.parts = std::move(parts);
  return spec;
}

// Sizes that no number of shards divides; experts as one tensor each, and stacked.
std::vector<ParameterSpec> layer_specs() {
  ParameterSpec qkv = spec_of("qkv", {25, 10}, {{"q", {13, 10}}, {"k", {6, 10}}, {"v", {6, 10}}});
  ParameterSpec output = spec_of("output", {10, 13}, {{"o", {10, 13}}});
  ParameterSpec router = spec_of("router", {kExperts, 10}, {{"gate", {kExperts, 10}}});
  router.rule = UpdateRule::kAdamW;
  ParameterSpec norm = spec_of("norm", {10}, {{"norm.weight", {10}}});
  norm.rule = UpdateRule::kAdamW;
  norm.decay = false;
  norm.init = InitKind::kConstant;
  norm.init_value = 1.0f;
  ParameterSpec gate_up = spec_of("experts.gate_up", {kExperts, 14, 10}, {});
  ParameterSpec stacked = spec_of("experts.stacked", {kExperts, 5, 3}, {{"stack", {kExperts, 5, 3}}});
  ParameterSpec bias = spec_of("experts.bias", {kExperts, 9}, {{"bias", {kExperts, 9}}});
  bias.rule = UpdateRule::kAdamW;
  bias.decay = false;
  gate_up.expert = stacked.expert = bias.expert = true;
  for (int64_t e = 0; e < kExperts; ++e) {
    gate_up.parts.push_back({fmt::format("{}.gate", e), {7, 10}});
    gate_up.parts.push_back({fmt::format("{}.up", e), {7, 10}});
  }
  return {norm, qkv, router, gate_up, output, bias, stacked};
}

void add_all(ParameterStore& store) {
  ParameterSpec embedding = spec_of("embedding", {515, 10}, {{"embed", {515, 10}}});
  embedding.rule = UpdateRule::kAdamW;
  store.add("embedding", {embedding});
  store.add("layers.0", layer_specs());
}

ParameterStore::Options options_with(bool muon, at::ScalarType dtype = at::kFloat) {
  ParameterStore::Options options;
  options.muon = muon;
  options.working_dtype = dtype;
  return options;
}

// This rank's experts of an unsharded store's parameter.
at::Tensor expected_value(const ParameterStore& whole, const std::string& name, const RankGroup& ep) {
  const at::Tensor value = whole.table().at(name).value;
  if (!name.starts_with("experts")) return value;
  return value.narrow(0, ep.index * kExperts / ep.size, kExperts / ep.size);
}

TEST(ParameterStore, EveryElementHasOneOwner) {
  for (const bool muon : {false, true}) {
    for (const MeshShape& shape : sharded_meshes()) {
      std::map<std::string, std::vector<int>> owners;  // per element, over the ranks of a replica
      std::map<std::string, int64_t> matrix;           // elements that Muon keeps together
      for (const ParameterSpec& spec : layer_specs()) {
        const bool together = muon && spec.rule == UpdateRule::kMuon;
        for (const HubTensor& part : spec.parts) {
          matrix[part.name] = together ? part.shape.back() * part.shape[part.shape.size() - 2] : 1;
        }
      }
      for (int64_t rank = 0; rank < shape.world(); ++rank) {
        ParameterStore::Options options = options_with(muon);
        options.place(Mesh(shape, rank));
        ParameterStore store(options);
        add_all(store);
        for (const OwnedRange& range : store.owned_ranges()) {
          const std::string& name = range.tensor->name;
          const int64_t together = std::max<int64_t>(1, matrix[name]), n = range.end - range.begin;
          EXPECT_EQ(range.begin % together + range.end % together, 0) << name << ", " << mesh_text(shape);
          EXPECT_EQ(range.master.numel(), n);
          EXPECT_EQ(range.exp_avg.numel(), n);
          ASSERT_EQ(range.exp_avg_sq.defined(), together == 1) << name;
          if (together == 1) {
            EXPECT_EQ(range.exp_avg_sq.numel(), n);
          }
          std::vector<int>& counts = owners[name];
          counts.resize(range.tensor->elements());
          for (int64_t i = range.begin; i < range.end; ++i) ++counts[i];
        }
      }
      ASSERT_EQ(owners.size(), 1u + 1 + 3 + 1 + 1 + 2 * kExperts + 2);
      for (const auto& [name, counts] : owners) {
        for (const int count : counts) ASSERT_EQ(count, shape.replicate) << name << ", " << mesh_text(shape);
      }
    }
  }
}

TEST(ParameterStore, InitialValuesDoNotDependOnTheMesh) {
  for (const bool muon : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      ParameterStore whole(options_with(muon, dtype));
      add_all(whole);
      whole.initialize(5);
      EXPECT_FALSE(whole.table().at("experts.gate_up").value[0].equal(whole.table().at("experts.gate_up").value[1]));
      for (const MeshShape& shape : sharded_meshes()) {
        MeshRanks(shape).run(options_with(muon, dtype), [&](const MeshRanks::Rank& rank) {
          ParameterStore store(rank.options);
          add_all(store);
          store.initialize(5);
          for (const auto& [name, parameter] : store.table()) {
            ASSERT_TRUE(parameter.value.equal(expected_value(whole, name, rank.options.ep)))
                << name << ", " << mesh_text(shape);
          }
        });
      }
    }
  }
}

TEST(ParameterStore, GradientsAreSumsOverShardsAndReplicas) {
  for (const MeshShape& shape : sharded_meshes()) {
    MeshRanks(shape).run(options_with(true), [&](const MeshRanks::Rank& rank) {
      ParameterStore store(rank.options);
      add_all(store);
      for (FlatGroup& group : store.groups()) {
        group.grad.copy_(at::arange(group.elements()).add_(1000 * rank.mesh.rank));
        store.start_reduce(group);
      }
      store.sum_replicas();
      for (FlatGroup& group : store.groups()) {  // experts are summed over the ranks that share e
        const bool experts = group.name.ends_with(".experts");
        int64_t ranks = 0, sum = 0;
        for (int64_t other = 0; other < shape.world(); ++other) {
          if (experts && Mesh(shape, other).e != rank.mesh.e) continue;
          ++ranks;
          sum += 1000 * other;
        }
        const at::Tensor want = at::arange(group.begin(), group.end()).mul_(ranks).add_(sum).to(at::kFloat);
        ASSERT_TRUE(group.own_grad.equal(want)) << group.name << ", " << mesh_text(shape);
      }
    });
  }
}

int64_t bytes_of(const ParameterStore& store, std::string_view kind) {
  for (const auto& [name, bytes] : store.bytes()) {
    if (name == kind) return bytes;
  }
  ADD_FAILURE() << "no " << kind;
  return 0;
}

TEST(ParameterStore, StatesShrinkWithTheShards) {
  const ParameterStore::Options options = options_with(false, at::kBFloat16);
  ParameterStore whole(options);
  add_all(whole);
  const int64_t n = bytes_of(whole, "gradients") / 4;
  EXPECT_EQ(bytes_of(whole, "parameters"), 6 * n);
  EXPECT_EQ(bytes_of(whole, "optimizer states"), 8 * n);
  for (const int64_t shards : {2, 4, 8}) {
    ParameterStore::Options cut = options;
    cut.place(Mesh({1, shards, 1, 1, 1}, shards - 1));
    cut.device = at::kMeta;  // the sizes alone
    ParameterStore store(cut);
    add_all(store);
    const int64_t padded = bytes_of(store, "gradients") / 4;
    EXPECT_LE(padded - n, 3 * 64 * shards);  // of three groups
    EXPECT_EQ(bytes_of(store, "parameters"), 2 * padded + 4 * padded / shards);
    EXPECT_EQ(bytes_of(store, "optimizer states"), 8 * padded / shards);
  }
  ParameterStore::Options by_layer = options;
  by_layer.place(Mesh({1, 4, 1, 1, 1}, 1));
  by_layer.by_layer = true;
  ParameterStore divided(by_layer);
  add_all(divided);
  by_layer.device = at::kMeta;
  ParameterStore planned(by_layer);
  add_all(planned);
  EXPECT_EQ(planned.bytes(), divided.bytes());
  for (const char* kind : {"parameters", "gradients"}) {
    EXPECT_LE(std::abs(bytes_of(divided, kind) - n), 3 * 64 * 4) << kind;  // 4 n bytes, a quarter
  }
  // Two ranks of experts hold half of them.
  ParameterStore::Options half = options;
  half.place(Mesh({1, 1, 1, 2, 1}, 1));
  ParameterStore store(half);
  add_all(store);
  EXPECT_EQ(store.groups_of("layers.0")[1].specs[0].shape[0], kExperts / 2);
  EXPECT_EQ(whole.elements() - store.elements(), kExperts / 2 * (14 * 10 + 9 + 5 * 3));
}

TEST(ParameterStore, ExpertsMustDivideByTheirRanks) {
  ParameterStore::Options options;
  options.place(Mesh({1, 1, 1, 3, 1}, 0));
  ParameterStore store(options);
  try {
    add_all(store);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("mesh.ep = 3"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace marrow::test
