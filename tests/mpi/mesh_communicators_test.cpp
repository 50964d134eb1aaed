// The groups of every mesh of the run's size: each has the members that the mesh says.
#include "ops/pch.h"
// After the precompiled header:
#include <gtest/gtest.h>

#include "mpi/mpi_test_support.h"

namespace marrow {
namespace {

std::vector<MeshShape> meshes(int64_t world) {
  std::vector<MeshShape> shapes;
  for (int64_t pp = 1; pp <= world; ++pp) {
    for (int64_t dp = 1; dp <= world; ++dp) {
      for (int64_t cp = 1; cp <= world; ++cp) {
        for (int64_t ep = 1; ep <= world; ++ep) {
          if (pp * dp * cp * ep != world) continue;
          shapes.push_back({pp, dp, cp, ep, 1});
          if (dp % 2 == 0) shapes.push_back({pp, dp, cp, ep, 2});
        }
      }
    }
  }
  return shapes;
}

// Sums 2^rank over the group: each member leaves its bit.
void expect_members(Communicator* group, const std::vector<int64_t>& ranks) {
  ASSERT_EQ(group == nullptr, ranks.size() <= 1);
  if (group == nullptr) return;
  const at::Tensor bits = at::full({1}, int64_t{1} << test_bootstrap().rank(), on_device(at::kLong));
  group->all_reduce(bits).wait();
  int64_t expected = 0;
  for (const int64_t rank : ranks) expected |= int64_t{1} << rank;
  EXPECT_EQ(bits.item<int64_t>(), expected) << group->name();
  EXPECT_EQ(ranks[static_cast<size_t>(group->rank())], test_bootstrap().rank());
}

// Up the pipeline and down again, both at the same time.
void expect_links(const Mesh& mesh, const MeshCommunicators& made) {
  const bool has_next = mesh.p + 1 < mesh.shape.pp, has_previous = mesh.p > 0;
  ASSERT_EQ(made.to_next != nullptr, has_next);
  ASSERT_EQ(made.from_next != nullptr, has_next);
  ASSERT_EQ(made.to_previous != nullptr, has_previous);
  ASSERT_EQ(made.from_previous != nullptr, has_previous);
  const at::Tensor mine = at::full({3}, mesh.rank, on_device(at::kLong)), below = at::empty_like(mine),
                   above = at::empty_like(mine);
  std::vector<PendingTransfer> transfers;
  if (has_next) {
    transfers.push_back(made.to_next->send(mine, 1));
    transfers.push_back(made.from_next->receive(above, 1));
  }
  if (has_previous) {
    transfers.push_back(made.to_previous->send(mine, 0));
    transfers.push_back(made.from_previous->receive(below, 0));
  }
  for (PendingTransfer& transfer : transfers) transfer.wait();
  const auto neighbour = [&](int64_t p) {
    return at::full({3}, mesh.rank_at(p, mesh.d, mesh.c, mesh.e), on_device(at::kLong));
  };
  EXPECT_TRUE(!has_next || at::equal(above, neighbour(mesh.p + 1)));
  EXPECT_TRUE(!has_previous || at::equal(below, neighbour(mesh.p - 1)));
}

TEST(MeshCommunicators, EveryMeshHasItsGroups) {
  for (const MeshShape& shape : meshes(test_bootstrap().size())) {
    const Mesh mesh(shape, test_bootstrap().rank());
    SCOPED_TRACE(
        fmt::format("pp {} dp {} cp {} ep {} replicate {}", shape.pp, shape.dp, shape.cp, shape.ep, shape.replicate));
    CommunicatorOptions options;
    options.device = test_device();
    const MeshCommunicators made = make_mesh_communicators(mesh, test_bootstrap(), options);
    expect_members(made.expert.get(), mesh.expert_group());
    expect_members(made.context.get(), mesh.context_group());
    expect_members(made.dense_shard.get(), mesh.dense_shard_group());
    expect_members(made.expert_shard.get(), mesh.expert_shard_group());
    expect_members(made.replica.get(), mesh.replica_group());
    expect_links(mesh, made);
  }
}

TEST(Bootstrap, GathersBytesOfAnyLengthAndKnowsTheHost) {
  Bootstrap& bootstrap = test_bootstrap();
  const std::string mine(static_cast<size_t>(bootstrap.rank() * 3), static_cast<char>('a' + bootstrap.rank()));
  const std::vector<std::string> all = bootstrap.all_gather(mine);
  for (int64_t r = 0; r < bootstrap.size(); ++r) {
    EXPECT_EQ(all[static_cast<size_t>(r)], std::string(static_cast<size_t>(r * 3), static_cast<char>('a' + r)));
  }
  EXPECT_EQ(bootstrap.broadcast(fmt::format("from {}", bootstrap.rank()), bootstrap.size() - 1),
            fmt::format("from {}", bootstrap.size() - 1));
  std::array<char, 64> host{};
  gethostname(host.data(), host.size() - 1);
  const bool own_host = std::string_view(host.data()).starts_with("gpu-rank-");  // tools/gpu_rank.sh
  EXPECT_EQ(bootstrap.local_rank(), own_host ? 0 : bootstrap.rank());
  EXPECT_EQ(bootstrap.ranks_on_host(), own_host ? 1 : bootstrap.size());
}

TEST(Bootstrap, AnErrorOfOneRankIsEveryRanksError) {
  Bootstrap& bootstrap = test_bootstrap();
  std::string told;
  int code = 0;
  try {
    run_together(bootstrap, [&] {
      MARROW_CHECK(bootstrap.rank() != 1, ExitCode::kBadInput, Fix("repair it"), "rank {} found no file", 1);
    });
  } catch (const Error& error) {
    told = error.what();
    code = static_cast<int>(error.report().code);
  } catch (const PeerFailure& failure) {
    code = failure.code;
  }
  EXPECT_EQ(code, static_cast<int>(ExitCode::kBadInput));
  EXPECT_EQ(told, bootstrap.rank() == 1 ? "rank 1 found no file" : "");
  run_together(bootstrap, [] {});
}

TEST(Bootstrap, AnotherConfigOnOneRankIsNamed) {
  Bootstrap& bootstrap = test_bootstrap();
  check_same_on_all_ranks(bootstrap, "the run config", "seed = 1\nlr = 2\n");
  std::string told;
  try {
    check_same_on_all_ranks(bootstrap, "the run config",
                            bootstrap.rank() == 1 ? "seed = 1\nlr = 3\n" : "seed = 1\nlr = 2\n");
    ADD_FAILURE() << "no error on rank " << bootstrap.rank();
  } catch (const Error& error) {
    told = error.what();
  } catch (const PeerFailure&) {
  }
  EXPECT_EQ(told, bootstrap.rank() == 1
                      ? "the run config differs between ranks: rank 0 has \"lr = 2\", rank 1 has \"lr = 3\""
                      : "");
}

}  // namespace
}  // namespace marrow
