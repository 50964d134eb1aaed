#include "parallel/mesh.h"

#include "ops/pch.h"

namespace marrow {
namespace {

struct Range {
  int64_t begin = 0, end = 0;
};

Range only(int64_t index) { return {index, index + 1}; }

// The ranks with each coordinate in its range, ascending.
std::vector<int64_t> ranks_in(const Mesh& mesh, Range p, Range d, Range c, Range e) {
  std::vector<int64_t> ranks;
  for (int64_t i = p.begin; i < p.end; ++i) {
    for (int64_t j = d.begin; j < d.end; ++j) {
      for (int64_t k = c.begin; k < c.end; ++k) {
        for (int64_t l = e.begin; l < e.end; ++l) ranks.push_back(mesh.rank_at(i, j, k, l));
      }
    }
  }
  return ranks;
}

// The data-parallel coordinates of the copy of the states that holds `mesh`.
Range shards_of_copy(const Mesh& mesh) {
  const int64_t shards = mesh.shape.dp / mesh.shape.replicate;
  const int64_t copy = mesh.d / shards;
  return {copy * shards, (copy + 1) * shards};
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

std::vector<int64_t> Mesh::expert_group() const { return ranks_in(*this, only(p), only(d), only(c), {0, shape.ep}); }

std::vector<int64_t> Mesh::context_group() const { return ranks_in(*this, only(p), only(d), {0, shape.cp}, only(e)); }

std::vector<int64_t> Mesh::pipeline_group() const { return ranks_in(*this, {0, shape.pp}, only(d), only(c), only(e)); }

std::vector<int64_t> Mesh::stage_group() const {
  return ranks_in(*this, only(p), {0, shape.dp}, {0, shape.cp}, {0, shape.ep});
}

std::vector<int64_t> Mesh::dense_shard_group() const {
  return ranks_in(*this, only(p), shards_of_copy(*this), {0, shape.cp}, {0, shape.ep});
}

std::vector<int64_t> Mesh::expert_shard_group() const {
  return ranks_in(*this, only(p), shards_of_copy(*this), {0, shape.cp}, only(e));
}

std::vector<int64_t> Mesh::replica_group() const {
  const int64_t shards = shape.dp / shape.replicate;
  std::vector<int64_t> ranks;
  for (int64_t copy = 0; copy < shape.replicate; ++copy) ranks.push_back(rank_at(p, copy * shards + d % shards, c, e));
  return ranks;
}

std::string Mesh::text() const { return fmt::format("rank {} (pp {}, dp {}, cp {}, ep {})", rank, p, d, c, e); }

}  // namespace marrow
