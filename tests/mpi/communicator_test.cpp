// Every operation of a communicator, verified by content, on all ranks of the run.
#include "ops/pch.h"
// After the precompiled header:
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "mpi/mpi_test_support.h"

namespace marrow {
namespace {

class CommunicatorTest : public testing::Test {
 protected:
  CommunicatorTest() {
    records_.open(test_folder() + "/communicators", test_bootstrap(), fmt::format("rank {}", test_bootstrap().rank()),
                  60.0);
    made_ = make({});
  }
  MeshCommunicators make(std::optional<bool> checked) {
    MeshShape shape;
    shape.dp = test_bootstrap().size();
    CommunicatorOptions options;
    options.records = &records_;
    options.device = test_device();
    options.checked = checked;
    return make_mesh_communicators(Mesh(shape, test_bootstrap().rank()), test_bootstrap(), options);
  }
  Communicator& world() { return *made_.world; }
  int64_t rank() { return world().rank(); }
  int64_t size() { return world().size(); }
  // Ranges whose lengths differ, one of them empty.
  std::vector<int64_t> bounds(bool equal) {
    std::vector<int64_t> bounds{0};
    for (int64_t r = 0; r < size(); ++r) bounds.push_back(bounds.back() + (equal ? 5 : (r * 7) % 11));
    return bounds;
  }
  RunRecords records_{/*json=*/false};  // slots are not given back: new ones for each test
  MeshCommunicators made_;
};

TEST_F(CommunicatorTest, AllReduceSums) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kInt, at::kLong}) {
    for (const int64_t length : {0, 1, 17, 10007}) {
      const at::Tensor values = at::arange(length, on_device(type)) + rank();
      PendingTransfer transfer = world().all_reduce(values);
      transfer.wait();
      transfer.wait();  // does nothing
      const at::Tensor expected = at::arange(length, on_device(type)) * size() + size() * (size() - 1) / 2;
      EXPECT_TRUE(at::equal(values, expected)) << at::toString(type) << " " << length;
    }
  }
  EXPECT_THROW(world().all_reduce(at::ones({2}, on_device(at::kBFloat16))), Error);
}

TEST_F(CommunicatorTest, AllReduceGivesAllRanksTheSameBits) {
  at::Tensor values = at::rand({9973}, on_device(at::kFloat)) * static_cast<float>(rank() + 1) / 3;
  world().all_reduce(values).wait();
  const at::Tensor all = at::full({size(), values.numel()}, NAN, on_device(at::kFloat));
  all[rank()].copy_(values);
  std::vector<int64_t> bounds;
  for (int64_t r = 0; r <= size(); ++r) bounds.push_back(r * values.numel());
  world().all_gather(all, bounds).wait();
  for (int64_t r = 0; r < size(); ++r) EXPECT_TRUE(at::equal(values, all[r]));
}

TEST_F(CommunicatorTest, GatherAndReduceScatterOfEqualAndUnequalRanges) {
  for (const bool equal : {true, false}) {
    const std::vector<int64_t> ranges = bounds(equal);
    const int64_t begin = ranges[rank()], length = ranges[rank() + 1] - begin;
    const at::Tensor expected = at::arange(ranges.back(), on_device(at::kFloat));
    const at::Tensor whole = at::full({ranges.back()}, -1.0, on_device(at::kFloat));
    whole.narrow(0, begin, length).copy_(expected.narrow(0, begin, length));
    world().all_gather(whole, ranges).wait();
    EXPECT_TRUE(at::equal(whole, expected)) << equal;

    const at::Tensor summed = expected * static_cast<double>(rank() + 1);
    world().reduce_scatter(summed, ranges).wait();
    const double factor = static_cast<double>(size() * (size() + 1) / 2);
    EXPECT_TRUE(at::equal(summed.narrow(0, begin, length), (expected * factor).narrow(0, begin, length))) << equal;
  }
}

using Table = std::vector<std::vector<int64_t>>;  // rows from [sender] to [receiver]

// The same on all ranks. About 30 % zeros; every tenth has an empty row, column, or is empty.
Table split_table(int64_t round, int64_t size) {
  std::mt19937_64 random(static_cast<uint64_t>(round));
  Table table(size, std::vector<int64_t>(size));
  for (auto& row : table) {
    for (int64_t& count : row) count = random() % 10 < 3 ? 0 : static_cast<int64_t>(random() % 9);
  }
  const size_t chosen = random() % size;
  if (round % 10 == 7) table[chosen].assign(size, 0);
  if (round % 10 == 8) {
    for (auto& row : table) row[chosen] = 0;
  }
  if (round % 10 == 9) table.assign(size, std::vector<int64_t>(size, 0));
  return table;
}

// One row: sender, receiver, index, round.
at::Tensor labelled_rows(int64_t sender, int64_t receiver, int64_t count, int64_t round) {
  const at::Tensor index = at::arange(count, on_device(at::kLong));
  return at::stack({at::full_like(index, sender), at::full_like(index, receiver), index, at::full_like(index, round)},
                   1);
}

TEST_F(CommunicatorTest, ThousandRandomSplitTables) {
  int64_t rows = 0;
  for (int64_t round = 0; round < 1000; ++round) {
    const Table table = split_table(round, size());
    std::vector<int64_t> received_rows;
    std::vector<at::Tensor> sent, expected;
    for (int64_t peer = 0; peer < size(); ++peer) {
      sent.push_back(labelled_rows(rank(), peer, table[rank()][peer], round));
      expected.push_back(labelled_rows(peer, rank(), table[peer][rank()], round));
      received_rows.push_back(table[peer][rank()]);
    }
    const at::Tensor wanted = at::cat(expected), received = at::full_like(wanted, -1);
    world().all_to_all(at::cat(sent), table[rank()], received, received_rows).wait();
    ASSERT_TRUE(at::equal(received, wanted)) << "round " << round << "\n" << received << "\n" << wanted;
    rows += received.size(0);
  }
  EXPECT_GT(rows, 1000);
}

TEST_F(CommunicatorTest, MessagesArriveInOrderAndBigOnesCross) {
  const int64_t next = (rank() + 1) % size(), previous = (rank() + size() - 1) % size();
  std::vector<PendingTransfer> transfers;
  std::vector<at::Tensor> received;
  for (int64_t i = 0; i < 20; ++i) {
    const int64_t length = i % 3 == 0 ? 100'003 : i;
    received.push_back(at::empty({length}, on_device(at::kLong)));
    const at::Tensor sent = at::full({length}, 1000 * rank() + i, on_device(at::kLong));
    // On a GPU a message may wait until it is received, so not all ranks send first.
    if (rank() % 2 == 0) transfers.push_back(world().send(sent, next));
    transfers.push_back(world().receive(received.back(), previous));
    if (rank() % 2 == 1) transfers.push_back(world().send(sent, next));
  }
  for (auto transfer = transfers.rbegin(); transfer != transfers.rend(); ++transfer) transfer->wait();
  for (int64_t i = 0; i < 20; ++i) EXPECT_TRUE(at::equal(received[i], at::full_like(received[i], 1000 * previous + i)));

  const at::Tensor mine = at::full({1'000'003}, static_cast<float>(rank()), on_device(at::kFloat)),
                   theirs = at::empty_like(mine);
  world().exchange(mine, next, theirs, previous).wait();
  EXPECT_TRUE(at::equal(theirs, at::full_like(mine, static_cast<double>(previous))));
}

TEST_F(CommunicatorTest, OperationsOfTwoGroupsGoOnAtOnce) {
  const at::Tensor a = at::ones({70'001}, on_device(at::kFloat)), b = at::ones({70'001}, on_device(at::kFloat)) * 2;
  const bool world_first = rank() % 2 == 0 || test_device().is_cuda();  // NCCL wants one order on all ranks
  PendingTransfer first = world_first ? made_.world->all_reduce(a) : made_.dense_shard->all_reduce(b);
  PendingTransfer second = world_first ? made_.dense_shard->all_reduce(b) : made_.world->all_reduce(a);
  first.wait();
  second.wait();
  EXPECT_EQ(a[5].item<float>(), static_cast<float>(size()));
  EXPECT_EQ(b[5].item<float>(), static_cast<float>(2 * size()));
}

// What `body` throws, "" for nothing.
template <typename Body>
std::string thrown(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(CommunicatorTest, ChecksNameBothRanksAndBothSizes) {
  const MeshCommunicators checked = make(true);
  Communicator& group = *checked.world;
  at::Tensor values = at::ones({8}, on_device(at::kFloat));
  group.all_reduce(values).wait();
  EXPECT_EQ(values[0].item<float>(), static_cast<float>(size()));

  std::vector<int64_t> rows(size(), 2);
  if (rank() == 0) rows[1] = 3;  // one rank states a wrong size
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const std::string wrong = thrown([&] {
    group
        .all_to_all(at::ones({total, 4}, on_device(at::kFloat)), rows, at::ones({2 * size(), 4}, on_device(at::kFloat)),
                    std::vector<int64_t>(size(), 2))
        .wait();
  });
  EXPECT_EQ(wrong, "all_to_all in group world: rank 0 sends 3 rows to rank 1, which expects 2");

  const std::string sizes =
      thrown([&] { group.all_reduce(at::ones({rank() == 1 ? 9 : 8}, on_device(at::kFloat))).wait(); });
  EXPECT_EQ(sizes, "group world: rank 0 calls all_reduce of 32 bytes, rank 1 all_reduce of 36 bytes");
  std::vector<int64_t> ends(group.size() + 1, 8);
  ends[0] = 0;
  const std::string kinds =
      thrown([&] { rank() == 1 ? group.all_gather(values, ends).wait() : group.all_reduce(values).wait(); });
  EXPECT_EQ(kinds, "group world: rank 0 calls all_reduce of 32 bytes, rank 1 all_gather of 32 bytes");

  if (test_device().is_cuda()) return;  // what was sent wrongly would be waited for
  const std::string message = thrown([&] {
    if (rank() == 0) group.send(at::ones({3}, on_device(at::kFloat)), 1).wait();
    if (rank() == 1) group.receive(values.narrow(0, 0, 4), 0).wait();
  });
  EXPECT_EQ(message, rank() == 1 ? "message in group world: rank 0 sends 12 bytes to rank 1, which expects 16" : "");
}

TEST_F(CommunicatorTest, WithoutChecksAShortMessageIsStillAnError) {
  if (test_device().is_cuda()) return;  // NCCL cannot tell
  const std::string message = thrown([&] {
    if (rank() == 0) world().send(at::ones({3}, on_device(at::kFloat)), 1).wait();
    if (rank() == 1) world().receive(at::ones({4}, on_device(at::kFloat)), 0).wait();
  });
  EXPECT_EQ(message.find("16 bytes wanted, 12 came") != std::string::npos, rank() == 1) << message;
  EXPECT_THROW(world().all_to_all(at::ones({3, 2}, on_device(at::kFloat)), std::vector<int64_t>(size(), 0),
                                  at::ones({0, 2}, on_device(at::kFloat)), std::vector<int64_t>(size(), 0)),
               Error);
}

// More bytes than an int counts; run by itself (label slow).
TEST_F(CommunicatorTest, LargeTransfersGoInParts) {
  const int64_t bytes = (int64_t{1} << 31) + 12'345;
  if (rank() > 1) return;
  const at::Tensor values = at::full({bytes}, rank() + 1, on_device(at::kByte));
  if (rank() == 0) values[bytes - 1] = 77;
  rank() == 0 ? world().send(values, 1).wait() : world().receive(values, 0).wait();
  EXPECT_EQ(values[bytes - 1].item<int>(), 77);
  EXPECT_EQ(values[int64_t{1} << 30].item<int>(), 1);
  const at::Tensor others = values.narrow(0, 0, bytes - 1);
  EXPECT_EQ(others.min().item<int>(), 1);
  EXPECT_EQ(others.max().item<int>(), 1);
}

}  // namespace
}  // namespace marrow
