#include "train/optimizer.h"

#include "ops/philox_normal.h"
#include "parallel/mesh_ranks.h"
#include "train/checkpoint_testing.h"

namespace marrow {
namespace {

using test::MeshRanks;

ParameterStore::Options options_with(OptimizerName optimizer, at::ScalarType dtype = at::kFloat) {
  ParameterStore::Options options;
  options.muon = optimizer == OptimizerName::kMuon;
  options.working_dtype = dtype;
  return options;
}

PretrainConfig::Optimizer config_with(OptimizerName optimizer) {
  PretrainConfig::Optimizer config;
  config.name = optimizer;
  config.eps = 1e-3;
  config.weight_decay = 0.1;
  config.clip_norm = 1.0;
  return config;
}

// This rank's experts of a tensor of the whole model.
at::Tensor experts_of(const at::Tensor& whole, const std::string& name, const RankGroup& ep) {
  if (name.find("experts.") == std::string::npos) return whole;
  const int64_t share = whole.size(0) / ep.size;
  return whole.narrow(0, ep.index * share, share);
}

// The whole model's gradient of one parameter.
at::Tensor gradient_of(const std::string& name, at::IntArrayRef shape, int64_t step) {
  const at::Tensor gradient = at::empty(shape);
  philox_normal(gradient.flatten(), step, name, 0, 0.1);
  return gradient;
}

// Adds this rank's part of the gradients: over the ranks that hold a tensor the parts sum to all of it.
void add_gradients(const ParameterStore& whole, ParameterStore& store, const MeshRanks::Rank& rank, int64_t step) {
  for (const auto& [name, parameter] : store.table()) {
    const bool expert = name.find("experts.") != std::string::npos;
    const at::Tensor gradient = gradient_of(name, whole.table().at(name).value.sizes(), step);
    int64_t sum = 0;
    for (int64_t r = 0; r < rank.mesh.shape.world(); ++r) {
      if (!expert || Mesh(rank.mesh.shape, r).e == rank.mesh.e) sum += r + 1;
    }
    parameter.grad.add_(experts_of(gradient, name, rank.options.ep), (rank.mesh.rank + 1.0) / sum);
  }
}

void reduce(ParameterStore& store) {
  for (FlatGroup& group : store.groups()) store.start_reduce(group);
  store.sum_replicas();
}

void finish_gathers(ParameterStore& store) {
  for (FlatGroup& group : store.groups()) store.finish_gather(group);
}

TEST(Optimizer, StepsDoNotDependOnTheMesh) {
  for (const OptimizerName name : {OptimizerName::kAdamW, OptimizerName::kMuon}) {
    const ToyModel toy(name);
    ParameterStore whole(options_with(name));
    add_whole_model(*toy.model, whole);
    std::vector<double> norms;
    for (const MeshShape& shape : test::sharded_meshes()) {  // one rank first
      MeshRanks(shape).run(options_with(name), [&](const MeshRanks::Rank& rank) {
        ParameterStore store(rank.options);
        add_whole_model(*toy.model, store);
        store.initialize(3);
        Optimizer optimizer(store, config_with(name), rank.world);
        for (int64_t step = 1; step <= 3; ++step) {
          add_gradients(whole, store, rank, step);
          reduce(store);
          const at::Tensor loss = at::ones({1}, at::kDouble);
          optimizer.step(1e-2, step, loss);
          finish_gathers(store);
          EXPECT_EQ(loss.item<double>(), shape.world());
          for (const FlatGroup& group : store.groups()) ASSERT_TRUE(group.grad.eq(0).all().item<bool>());
          const double norm = optimizer.grad_norm().item<double>();
          if (shape.world() == 1) norms.push_back(norm);
          EXPECT_NEAR(norm, norms[step - 1], 1e-6 * norm) << test::mesh_text(shape);
        }
        if (shape.world() == 1) {
          EXPECT_GT(norms[0], 2.0);  // so that clipping acts
          for (const auto& [key, parameter] : store.table()) whole.table().at(key).value.copy_(parameter.value);
        }
        for (const auto& [key, parameter] : store.table()) {
          const at::Tensor want = experts_of(whole.table().at(key).value, key, rank.options.ep);
          EXPECT_LE((parameter.value - want).abs().max().item<double>(), 1e-6) << key << ", " << test::mesh_text(shape);
        }
      });
    }
  }
}

// Muon turns each logical matrix by itself: those that take turns in a tensor as two tensors of a matrix each would be.
TEST(Optimizer, MuonTakesMatricesApartThatTakeTurns) {
  struct Case {
    std::vector<int64_t> shape, turns, first;  // of the tensor, and of the first and the second matrix in it
    std::vector<int64_t> second;
    std::function<at::Tensor(const at::Tensor&, bool)> part;  // of the tensor, as the first or second matrix
  };
  const std::vector<Case> cases = {
      {{3, 5, 8},
       {1, 1},
       {3, 5, 4},
       {3, 5, 4},
       [](const at::Tensor& x, bool second) { return x.slice(2, second, {}, 2); }},
      // Two heads of three rows, and of two rows.
      {{10, 7},
       {21, 14},
       {6, 7},
       {4, 7},
       [](const at::Tensor& x, bool second) {
         return x.view({2, 5, 7}).slice(1, second ? 3 : 0, second ? 5 : 3).reshape({-1, 7});
       }},
      {{9, 4}, {20, 16}, {5, 4}, {4, 4}, [](const at::Tensor& x, bool second) {
         return x.slice(0, second ? 5 : 0, second ? 9 : 5);
       }}};
  for (const Case& c : cases) {
    const auto store_of = [](const std::vector<ParameterSpec>& specs) {
      ParameterStore store(options_with(OptimizerName::kMuon));
      store.add("group", specs);
      return store;
    };
    ParameterSpec both{"both", c.shape, {{"both", c.shape}}};
    both.parts[0].turns = c.turns;
    ParameterStore whole = store_of({both});
    ParameterStore apart = store_of({{"one", c.first, {{"one", c.first}}}, {"two", c.second, {{"two", c.second}}}});
    whole.initialize(3);
    Optimizer one(whole, config_with(OptimizerName::kMuon)), other(apart, config_with(OptimizerName::kMuon));
    const at::Tensor value = whole.table().at("both").value, grad = whole.table().at("both").grad;
    for (const std::string name : {"one", "two"}) apart.table().at(name).value.copy_(c.part(value, name == "two"));
    for (int64_t step = 1; step <= 3; ++step) {
      grad.copy_(gradient_of("both", c.shape, step));
      for (const std::string name : {"one", "two"}) apart.table().at(name).grad.copy_(c.part(grad, name == "two"));
      one.step(1e-2, step, at::ones({1}, at::kDouble));
      other.step(1e-2, step, at::ones({1}, at::kDouble));
      EXPECT_TRUE(grad.eq(0).all().item<bool>());
    }
    for (const std::string name : {"one", "two"}) {
      const at::Tensor difference = c.part(value, name == "two") - apart.table().at(name).value;
      EXPECT_LE(difference.abs().max().item<double>(), 1e-6) << name << " of " << c10::str(c.shape);
    }
  }
}

// Working copies and gradients that exist only while a layer needs them give the same steps.
TEST(Optimizer, ShardsByLayerTrainAlike) {
  const ToyModel toy;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    ParameterStore whole(options_with(toy.optimizer, dtype));
    add_whole_model(*toy.model, whole);
    for (const MeshShape& shape : {MeshShape{1, 1, 1, 1, 1}, MeshShape{1, 3, 1, 2, 1}, MeshShape{1, 4, 1, 2, 2}}) {
      MeshRanks(shape).run(options_with(toy.optimizer, dtype), [&](const MeshRanks::Rank& rank) {
        ParameterStore::Options options = rank.options;
        options.by_layer = true;
        ParameterStore by_step(rank.options), by_layer(options);
        for (ParameterStore* store : {&by_step, &by_layer}) {
          add_whole_model(*toy.model, *store);
          store->initialize(3);
          Optimizer optimizer(*store, config_with(toy.optimizer), rank.world);
          for (int64_t step = 1; step <= 2; ++step) {
            for (const int64_t micro_batch : {0, 1}) {
              for (FlatGroup& group : store->groups()) store->open_grad(group);
              add_gradients(whole, *store, rank, 2 * step + micro_batch);
              if (store == &by_step && micro_batch == 0) continue;
              for (FlatGroup& group : store->groups()) store->start_reduce(group);
            }
            store->sum_replicas();
            optimizer.step(1e-2, step, at::ones({1}, at::kDouble));
            finish_gathers(*store);
          }
        }
        for (size_t i = 0; i < by_step.groups().size(); ++i) {
          FlatGroup& group = by_layer.groups()[i];
          EXPECT_EQ(group.working.storage().nbytes() + group.grad.storage().nbytes(), 0u);
          for (int user = 0; user < 2; ++user) by_layer.start_gather(group);
          by_layer.finish_gather(group);
          by_layer.release(group);  // one user is left
          const at::Tensor difference = group.master - by_step.groups()[i].master;
          EXPECT_LE(difference.abs().max().item<double>(), 1e-6) << group.name << ", " << test::mesh_text(shape);
          EXPECT_TRUE(group.own(group.working).equal(group.master.to(dtype)));
          EXPECT_TRUE(group.working.isfinite().all().item<bool>());
          EXPECT_LE((group.working - by_step.groups()[i].working).abs().max().item<double>(),
                    dtype == at::kFloat ? 1e-6 : 8e-3);
          by_layer.release(group);
          EXPECT_EQ(group.working.storage().nbytes(), 0u);
        }
      });
    }
  }
}

TEST(Optimizer, OneRanksNanStopsTheUpdateOfAll) {
  const ToyModel toy;
  const MeshShape shape{1, 2, 1, 2, 1};
  for (const bool in_loss : {false, true}) {
    MeshRanks(shape).run(options_with(toy.optimizer), [&](const MeshRanks::Rank& rank) {
      ParameterStore store(rank.options);
      add_whole_model(*toy.model, store);
      store.initialize(3);
      std::vector<at::Tensor> before;
      for (const FlatGroup& group : store.groups()) before.push_back(group.working.clone());
      Optimizer optimizer(store, config_with(toy.optimizer), rank.world);
      for (const auto& [key, parameter] : store.table()) parameter.grad.fill_(0.5);
      const double nan = std::nan("");
      if (rank.mesh.rank == 2 && !in_loss) store.groups()[1].grad.narrow(0, 7, 1).fill_(nan);
      reduce(store);
      const at::Tensor loss = at::full({1}, rank.mesh.rank == 2 && in_loss ? nan : 1.0, at::kDouble);
      optimizer.step(1e-2, 1, loss);
      finish_gathers(store);
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(store.groups()[i].working.equal(before[i]));
        EXPECT_TRUE(store.groups()[i].grad.eq(0).all().item<bool>());
        EXPECT_TRUE(store.groups()[i].exp_avg.eq(0).all().item<bool>());
      }
      EXPECT_EQ(std::isfinite(loss.item<double>()), !in_loss);
      EXPECT_EQ(std::isfinite(optimizer.grad_norm().item<double>()), in_loss);
    });
  }
}

// N1: steps below bf16's resolution add up in the masters, which come back to the bit.
TEST(Optimizer, SmallUpdatesSurviveBf16) {
  const ToyModel toy;
  const TemporaryFolder folder;
  Logger log;
  PretrainConfig::Optimizer config = config_with(toy.optimizer);
  config.eps = 1e-8;
  const auto hundred_steps = [&](ParameterStore& store, int64_t done) {
    Optimizer optimizer(store, config);
    for (int64_t step = done + 1; step <= done + 100; ++step) {
      for (const auto& [key, parameter] : store.table()) parameter.grad.fill_(1e-3);
      optimizer.step(1e-3, step, at::ones({1}, at::kDouble));
    }
  };
  ParameterStore first(options_with(toy.optimizer, at::kBFloat16));
  add_whole_model(*toy.model, first);
  first.initialize(3);
  hundred_steps(first, 0);
  EXPECT_NEAR(first.table().at("layers.1.input_norm").value[5].item<double>(), 0.9, 0.005);

  CheckpointWriterOptions options;
  options.dir = folder / "checkpoints";
  CheckpointWriter writer(options, toy.entries, log);
  writer.save(toy_content(toy, first.owned_ranges(), 100));
  writer.finish();
  ParameterStore second(options_with(toy.optimizer, at::kBFloat16));
  add_whole_model(*toy.model, second);
  load_all(toy, *newest_checkpoint(options.dir, log), {second.owned_ranges()});
  second.copy_masters_to_working();
  for (size_t i = 0; i < first.groups().size(); ++i) {
    const FlatGroup &a = first.groups()[i], &b = second.groups()[i];
    EXPECT_TRUE(a.master.equal(b.master) && a.working.equal(b.working) && a.exp_avg.equal(b.exp_avg));
  }
  hundred_steps(second, 100);
  EXPECT_NEAR(second.table().at("layers.1.input_norm").value[5].item<double>(), 0.8, 0.005);
}

}  // namespace
}  // namespace marrow
