#include "parallel/mesh.h"

#include "ops/pch.h"

namespace marrow {
namespace {

// The ranks, ascending, for which `member` holds.
template <typename Member>
std::vector<int64_t> ranks_where(const MeshShape& shape, const Member& member) {
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < shape.world(); ++rank) {
    if (member(Mesh(shape, rank))) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

Mesh::Mesh(const MeshShape& shape, int64_t rank) : shape(shape), rank(rank) {
  MARROW_CHECK(shape.pp > 0 && shape.dp > 0 && shape.cp > 0 && shape.ep > 0, ExitCode::kUsage,
               Fix("set mesh.pp, dp, cp and ep to 1 or more"), "mesh pp {} x dp {} x cp {} x ep {} has an empty side",
               shape.pp, shape.dp, shape.cp, shape.ep);
  MARROW_CHECK(rank >= 0 && rank < shape.world(), ExitCode::kUsage, Fix("start as many processes as the mesh has"),
               "rank {} is outside a mesh of {}", rank, shape.world());
  MARROW_CHECK(shape.replicate > 0 && shape.dp % shape.replicate == 0, ExitCode::kUsage,
               Fix("set mesh.replicate to a divisor of mesh.dp"), "mesh.replicate {} does not divide mesh.dp {}",
               shape.replicate, shape.dp);
  e = rank % shape.ep;
  c = rank / shape.ep % shape.cp;
  d = rank / (shape.ep * shape.cp) % shape.dp;
  p = rank / (shape.ep * shape.cp * shape.dp);
}

int64_t Mesh::rank_at(int64_t p, int64_t d, int64_t c, int64_t e) const {
  return ((p * shape.dp + d) * shape.cp + c) * shape.ep + e;
}

std::vector<int64_t> Mesh::expert_group() const {
  return ranks_where(shape, [&](const Mesh& o) { return o.p == p && o.d == d && o.c == c; });
}

std::vector<int64_t> Mesh::context_group() const {
  return ranks_where(shape, [&](const Mesh& o) { return o.p == p && o.d == d && o.e == e; });
}

std::vector<int64_t> Mesh::pipeline_group() const {
  return ranks_where(shape, [&](const Mesh& o) { return o.d == d && o.c == c && o.e == e; });
}

std::vector<int64_t> Mesh::dense_shard_group() const {
  return ranks_where(shape, [&](const Mesh& o) { return o.p == p && o.copy() == copy(); });
}

std::vector<int64_t> Mesh::expert_shard_group() const {
  return ranks_where(shape, [&](const Mesh& o) { return o.p == p && o.copy() == copy() && o.e == e; });
}

std::vector<int64_t> Mesh::replica_group() const {
  const int64_t shards = shape.dp / shape.replicate;
  return ranks_where(shape,
                     [&](const Mesh& o) { return o.p == p && o.d % shards == d % shards && o.c == c && o.e == e; });
}

std::string Mesh::text() const { return fmt::format("rank {} (pp {}, dp {}, cp {}, ep {})", rank, p, d, c, e); }

}  // namespace marrow
