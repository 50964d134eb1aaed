// Checkpoints written by the shards of one mesh and read by those of another.
#include "parallel/mesh_ranks.h"
#include "train/checkpoint_testing.h"

namespace marrow {
namespace {

using test::MeshRanks;

constexpr int64_t kLayers = 8;

std::string deep_config() {
  std::string text = toy_config_text();
  const std::string layers = "\"num_hidden_layers\": 2";
  return text.replace(text.find(layers), layers.size(), fmt::format("\"num_hidden_layers\": {}", kLayers));
}

ParameterStore::Options options_for(const ToyModel& toy) {
  ParameterStore::Options options;
  options.muon = toy.optimizer == OptimizerName::kMuon;
  return options;
}

// The store of one pipeline stage.
void add_stage(const MoeModel& model, const Mesh& mesh, ParameterStore& store) {
  const int64_t share = kLayers / mesh.shape.pp;
  if (mesh.p == 0) store.add("embedding", model.embedding_specs());
  for (int64_t layer = mesh.p * share; layer < (mesh.p + 1) * share; ++layer) {
    store.add(fmt::format("layers.{}", layer), model.layer_specs(layer));
  }
  if (mesh.p + 1 == mesh.shape.pp) store.add("head", model.head_specs());
}

void save(const ToyModel& toy, const MeshRanks::Rank& rank, ParameterStore& store, const std::string& dir) {
  CheckpointWriterOptions options;
  options.dir = dir;
  options.async = rank.mesh.rank % 2 == 0;
  options.rank = rank.mesh.rank;
  options.ranks = rank.mesh.shape.world();
  options.run = "run";
  options.max_shard_bytes = 100'000;
  Logger log;
  CheckpointWriter writer(options, toy.entries, log);
  const bool writes = store.options().replicas.index == 0;
  writer.save(toy_content(toy, writes ? store.owned_ranges() : std::vector<OwnedRange>(), 1));
  writer.finish();
}

// The newest checkpoint, as the ranks agree on it; each has checked its part.
Checkpoint open_together(const MeshRanks::Rank& rank, const std::string& dir, Logger& log) {
  ContentCheck check;
  check.rank = rank.mesh.rank;
  check.ranks = rank.mesh.shape.world();
  check.all_agree = [&](bool sound) {
    const at::Tensor refusals = at::full({1}, sound ? 0 : 1, at::kLong);
    rank.world->all_reduce(refusals).wait();
    return refusals.item<int64_t>() == 0;
  };
  std::optional<Checkpoint> newest = newest_checkpoint(dir, log, check);
  MARROW_CHECK(newest.has_value(), ExitCode::kBadInput, Fix("save one first"), "{} holds no checkpoint", dir);
  return std::move(*newest);
}

void load(const ToyModel& toy, const Checkpoint& checkpoint, ParameterStore& store) {
  load_all(toy, checkpoint, {store.owned_ranges()});
  store.copy_masters_to_working();
}

// C3: weights, masters and moments are the same bytes after every path.
TEST(CheckpointMesh, AnyMeshReadsAndWritesTheSameBytes) {
  for (const OptimizerName optimizer : {OptimizerName::kAdamW, OptimizerName::kMuon}) {
    const ToyModel toy(optimizer, deep_config());
    const TemporaryFolder folder;
    const std::string first = folder / "first";
    MeshRanks({2, 2, 1, 2, 1}).run(options_for(toy), [&](const MeshRanks::Rank& rank) {
      ParameterStore store(rank.options);
      add_stage(*toy.model, rank.mesh, store);
      for (const OwnedRange& range : store.owned_ranges()) {
        const auto fill = [&](const at::Tensor& values, int kind) {
          if (values.defined()) values.copy_(toy_values(*range.tensor, range.begin, range.end, kind, 1));
        };
        fill(range.master, 0);
        fill(range.exp_avg, 1);
        fill(range.exp_avg_sq, 2);
      }
      save(toy, rank, store, first);
    });
    const auto saved = contents(step_folder(first, 1));
    const std::vector<MeshShape> meshes{{1, 1, 1, 4, 1}, {4, 1, 1, 1, 1}, {1, 8, 1, 1, 1}, {1, 3, 1, 1, 1},
                                        {1, 1, 1, 1, 1}, {2, 2, 2, 1, 2}, {1, 4, 1, 2, 2}};
    for (const MeshShape& shape : meshes) {
      const std::string again = folder / fmt::format("pp {} {}", shape.pp, test::mesh_text(shape));
      MeshRanks(shape).run(options_for(toy), [&](const MeshRanks::Rank& rank) {
        ParameterStore store(rank.options);
        add_stage(*toy.model, rank.mesh, store);
        Logger log;
        load(toy, open_together(rank, first, log), store);
        expect_filled({store.owned_ranges()}, 1);
        save(toy, rank, store, again);
      });
      const auto files = contents(step_folder(again, 1));
      ASSERT_EQ(files.size(), saved.size());
      for (const auto& [name, text] : saved) ASSERT_TRUE(files.at(name) == text) << again << ": " << name;
    }
  }
}

// C1: an expert is the same one on any number of expert ranks, its moments too.
TEST(CheckpointMesh, ExpertsKeepTheirOwnNumbers) {
  const ToyModel toy(OptimizerName::kAdamW, deep_config());
  const TemporaryFolder folder;
  const std::string dir = folder / "checkpoints";
  constexpr int64_t kExperts = 8;
  const auto each_expert = [&](ParameterStore& store, const auto& visit) {
    for (const OwnedRange& range : store.owned_ranges()) {
      const size_t at = range.tensor->name.find(".experts.");
      if (at == std::string::npos) continue;
      visit(range, std::stod(range.tensor->name.substr(at + 9)));
    }
  };
  MeshRanks({1, 2, 1, 4, 1}).run(options_for(toy), [&](const MeshRanks::Rank& rank) {
    ParameterStore store(rank.options);
    add_stage(*toy.model, rank.mesh, store);
    each_expert(store, [](const OwnedRange& range, double e) {
      range.master.fill_(e);
      range.exp_avg.fill_(e + 0.25);
      range.exp_avg_sq.fill_(e + 0.5);
    });
    save(toy, rank, store, dir);
  });
  for (const int64_t ep : {1, 2, 4}) {
    MeshRanks({1, 1, 2, ep, 1}).run(options_for(toy), [&](const MeshRanks::Rank& rank) {
      ParameterStore store(rank.options);
      add_stage(*toy.model, rank.mesh, store);
      Logger log;
      load(toy, open_together(rank, dir, log), store);
      each_expert(store, [](const OwnedRange& range, double e) {
        ASSERT_TRUE(range.exp_avg.eq(e + 0.25).all().item<bool>()) << range.tensor->name;
        ASSERT_TRUE(range.exp_avg_sq.eq(e + 0.5).all().item<bool>()) << range.tensor->name;
      });
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        for (const char* name : {"gate_up", "down"}) {
          const at::Tensor value = store.table().at(fmt::format("layers.{}.experts.{}", layer, name)).value;
          ASSERT_EQ(value.size(0), kExperts / ep);
          for (int64_t local = 0; local < value.size(0); ++local) {
            const int64_t e = rank.mesh.e * value.size(0) + local;
            ASSERT_TRUE(value[local].eq(e).all().item<bool>()) << name << " of expert " << e;
          }
        }
      }
    });
  }
}

// The rank that reads a damaged file speaks for all.
TEST(CheckpointMesh, RanksAgreeOnTheNewestSoundCheckpoint) {
  const ToyModel toy;
  const TemporaryFolder folder;
  CheckpointWriterOptions options;
  options.dir = folder / "checkpoints";
  for (const int64_t step : {1, 2}) save_as_ranks(toy, cut(toy, 1, 0, step), options, step);
  const std::string damaged = step_folder(options.dir, 2) + "/optimizer-00001-of-00001.safetensors";
  flip_byte(damaged, fs::file_size(damaged) * 3 / 4);
  testing::internal::CaptureStderr();
  MeshRanks({1, 3, 1, 1, 1}).run({}, [&](const MeshRanks::Rank& rank) {
    Logger log;
    EXPECT_EQ(open_together(rank, options.dir, log).state().step, 1);
  });
  const std::string warnings = testing::internal::GetCapturedStderr();
  EXPECT_NE(warnings.find("optimizer-00001"), std::string::npos) << warnings;
  EXPECT_NE(warnings.find("another rank"), std::string::npos) << warnings;
}

}  // namespace
}  // namespace marrow
