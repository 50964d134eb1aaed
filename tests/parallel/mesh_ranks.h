// The ranks of a mesh as threads of one process.
#pragma once
#include <gtest/gtest.h>

#include <numeric>

#include "parallel/parameter_store.h"
#include "parallel/thread_communicator.h"

namespace marrow::test {

// The ranks of a mesh and a communicator for every group that a store or optimizer uses.
class MeshRanks {
 public:
  explicit MeshRanks(const MeshShape& shape) : shape_(shape) {}

  struct Rank {
    Mesh mesh;
    ParameterStore::Options options;
    Communicator* world = nullptr;
  };

  // body(Rank) on every rank at the same time.
  template <typename Body>
  void run(const ParameterStore::Options& options, Body body) {
    std::vector<Rank> ranks;
    std::vector<int64_t> everyone(shape_.world());
    std::iota(everyone.begin(), everyone.end(), 0);
    for (int64_t rank = 0; rank < shape_.world(); ++rank) {
      Rank r{Mesh(shape_, rank), options, communicator("world", everyone, rank)};
      r.options.place(r.mesh);
      r.options.dense.communicator = communicator("dense", r.mesh.dense_shard_group(), rank);
      r.options.experts.communicator = communicator("experts", r.mesh.expert_shard_group(), rank);
      r.options.replicas.communicator = communicator("replicas", r.mesh.replica_group(), rank);
      ranks.push_back(std::move(r));
    }
    std::vector<std::thread> threads;
    for (const Rank& rank : ranks) {
      threads.emplace_back([&, this] {
        omp_set_num_threads(1);
        try {
          body(rank);
        } catch (const std::exception& error) {
          ADD_FAILURE() << rank.mesh.text() << ": " << error.what();
          for (const auto& [key, mail] : groups_) mail->fail();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  Communicator* communicator(const char* kind, const std::vector<int64_t>& group, int64_t rank) {
    std::shared_ptr<ThreadMail>& shared = groups_[{kind, group}];
    if (!shared) shared = std::make_shared<ThreadMail>(static_cast<int64_t>(group.size()));
    const auto index = std::find(group.begin(), group.end(), rank) - group.begin();
    communicators_.push_back(std::make_unique<ThreadCommunicator>(shared, index));
    return communicators_.back().get();
  }

  MeshShape shape_;
  std::map<std::pair<std::string, std::vector<int64_t>>, std::shared_ptr<ThreadMail>> groups_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

// Meshes with 1, 2, 3, 4 and 8 shards, with copies, with 1, 2 and 4 expert ranks.
inline std::vector<MeshShape> sharded_meshes() {
  return {{1, 1, 1, 1, 1}, {1, 2, 1, 1, 1}, {1, 3, 1, 1, 1}, {1, 2, 2, 1, 1}, {1, 8, 1, 1, 1}, {1, 1, 1, 2, 1},
          {1, 1, 1, 4, 1}, {1, 3, 1, 2, 1}, {1, 2, 1, 4, 1}, {1, 2, 2, 2, 1}, {1, 2, 1, 1, 2}, {1, 2, 1, 2, 2},
          {1, 4, 1, 1, 2}, {1, 4, 1, 2, 2}, {1, 2, 2, 2, 2}, {1, 4, 1, 2, 4}, {1, 6, 1, 1, 2}};
}

inline std::string mesh_text(const MeshShape& m) {
  return fmt::format("dp {} cp {} ep {} replicate {}", m.dp, m.cp, m.ep, m.replicate);
}

}  // namespace marrow::test
