// Coordinates and groups of every small mesh: each group divides the world, its members agree on it.
#include "parallel/mesh.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"

namespace marrow {
namespace {

using Group = std::vector<int64_t> (Mesh::*)() const;

// Every rank is in its own group, and all members name the same group, in ascending order.
void expect_partition(const MeshShape& shape, Group group, int64_t size) {
  std::set<std::vector<int64_t>> groups;
  for (int64_t rank = 0; rank < shape.world(); ++rank) {
    const std::vector<int64_t> members = (Mesh(shape, rank).*group)();
    EXPECT_EQ(static_cast<int64_t>(members.size()), size);
    EXPECT_TRUE(std::is_sorted(members.begin(), members.end()));
    EXPECT_EQ(std::count(members.begin(), members.end(), rank), 1);
    for (const int64_t member : members) EXPECT_EQ((Mesh(shape, member).*group)(), members);
    groups.insert(members);
  }
  EXPECT_EQ(static_cast<int64_t>(groups.size()) * size, shape.world());
}

TEST(Mesh, GroupsPartitionEveryMesh) {
  for (const int64_t pp : {1, 2, 3}) {
    for (const int64_t dp : {1, 2, 4}) {
      for (const int64_t cp : {1, 2}) {
        for (const int64_t ep : {1, 3}) {
          for (const int64_t replicate : {1, 2}) {
            if (dp % replicate != 0) continue;
            const MeshShape shape{pp, dp, cp, ep, replicate};
            expect_partition(shape, &Mesh::expert_group, ep);
            expect_partition(shape, &Mesh::context_group, cp);
            expect_partition(shape, &Mesh::pipeline_group, pp);
            expect_partition(shape, &Mesh::dense_shard_group, dp / replicate * cp * ep);
            expect_partition(shape, &Mesh::expert_shard_group, dp / replicate * cp);
            expect_partition(shape, &Mesh::replica_group, replicate);
          }
        }
      }
    }
  }
}

TEST(Mesh, CoordinatesAndGroupsOfOneRank) {
  const Mesh mesh({2, 4, 2, 2, 2}, 22);  // ((1·4 + 1)·2 + 1)·2 + 0
  EXPECT_EQ(mesh.text(), "rank 22 (pp 1, dp 1, cp 1, ep 0)");
  EXPECT_EQ(mesh.rank_at(1, 1, 1, 0), 22);
  EXPECT_EQ(mesh.data_rank(), 2);
  EXPECT_EQ(mesh.data_ranks(), 8);
  EXPECT_EQ(mesh.expert_group(), (std::vector<int64_t>{22, 23}));
  EXPECT_EQ(mesh.context_group(), (std::vector<int64_t>{20, 22}));
  EXPECT_EQ(mesh.pipeline_group(), (std::vector<int64_t>{6, 22}));
  EXPECT_EQ(mesh.dense_shard_group(), (std::vector<int64_t>{16, 17, 18, 19, 20, 21, 22, 23}));
  EXPECT_EQ(mesh.expert_shard_group(), (std::vector<int64_t>{16, 18, 20, 22}));
  EXPECT_EQ(mesh.replica_group(), (std::vector<int64_t>{22, 30}));
}

TEST(Mesh, ImpossibleOnesAreErrors) {
  EXPECT_THROW(Mesh({1, 2, 1, 1, 1}, 2), Error);
  EXPECT_THROW(Mesh({1, 2, 1, 1, 1}, -1), Error);
  EXPECT_THROW(Mesh({1, 0, 1, 1, 1}, 0), Error);
  EXPECT_THROW(Mesh({1, 3, 1, 1, 2}, 0), Error);
}

}  // namespace
}  // namespace marrow
