// Where a rank stands in the mesh pp × dp × cp × ep, and which ranks it talks to.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace marrow {

struct MeshShape {
  int64_t pp = 1, dp = 1, cp = 1, ep = 1;
  int64_t replicate = 1;  // copies of the sharded states; divides dp
  int64_t world() const { return pp * dp * cp * ep; }
};

// rank = ((p·dp + d)·cp + c)·ep + e.
struct Mesh {
  MeshShape shape;
  int64_t rank = 0;
  int64_t p = 0, d = 0, c = 0, e = 0;

  Mesh() = default;  // one process
  Mesh(const MeshShape& shape, int64_t rank);

  // ep ranks read different sequences: data rank q = d·ep + e of D = dp·ep.
  int64_t data_rank() const { return d * shape.ep + e; }
  int64_t data_ranks() const { return shape.dp * shape.ep; }
  int64_t copy() const { return d / (shape.dp / shape.replicate); }  // of the sharded states
  int64_t rank_at(int64_t p, int64_t d, int64_t c, int64_t e) const;

  // World ranks of the groups that this rank is in, itself included, ascending.
  std::vector<int64_t> expert_group() const;    // ep: exchanges tokens
  std::vector<int64_t> context_group() const;   // cp: exchanges keys and values
  std::vector<int64_t> pipeline_group() const;  // pp: sends activations; index = p
  // The sharded states: dp/replicate × cp × ep ranks divide everything but experts, dp/replicate × cp
  // divide experts. Copy r of the states is on d in [r·dp/replicate, (r + 1)·dp/replicate): shards are
  // near each other, and replica_group (replicate ranks) is what holds the same shard.
  std::vector<int64_t> dense_shard_group() const;
  std::vector<int64_t> expert_shard_group() const;
  std::vector<int64_t> replica_group() const;

  std::string text() const;  // "rank 5 (pp 1, dp 0, cp 0, ep 1)"
};

}  // namespace marrow
