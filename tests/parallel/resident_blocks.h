// Kernels whose blocks wait for each other, on the CPU: every block of every rank is resident, and each of their
// threads is a fibre. Fibres are resumed in a random order, some ranks less often than others, so that blocks and ranks
// come to their meetings early or late. It proves indices, barriers (within the orders tried) and arithmetic; not how
// writes to another GPU become visible (memory here is one), nor alignment.
#pragma once
#include <ucontext.h>

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

struct uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  unsigned x;
};

namespace marrow::test {

struct Warp {
  uint32_t values[2][32] = {};
  int64_t given[32] = {};  // how many values a lane has given
  int sleeps = 0;          // rounds of the scheduler
};

struct Block {
  Index index, size, blocks;
  std::vector<int> shared;
  std::vector<Warp> warps;
  int sleeps = 0;
  unsigned arrived = 0, passed = 0;  // at the barrier; how often all were
};

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread;
  Block* block;
  std::function<void()>* body;
  bool done = false;
};

inline Fibre* current = nullptr;  // resumed by run_streams
inline ucontext_t scheduler;
inline uint64_t turns = 0;    // the clock of waits
inline bool gave_up = false;  // a kernel trapped: everything stops

inline void pause() { swapcontext(&current->context, &scheduler); }

// Every lane of the warp gives a value, and sees those of all.
inline const uint32_t* exchange(uint32_t value) {
  Warp& warp = current->block->warps[current->thread.x / 32];
  const unsigned lane = current->thread.x % 32;
  const int64_t number = ++warp.given[lane];
  warp.values[number % 2][lane] = value;
  for (unsigned i = 0; i < 32; ++i) {
    while (warp.given[i] < number) pause();
  }
  return warp.values[number % 2];
}

// A kernel's launch on one rank; `body` is what a thread does, with the block's shared ints.
struct Launch {
  unsigned blocks, threads;
  int shared_ints;
  std::function<void(int*)> body;
};

inline std::unique_ptr<Fibre> make_fibre(Index thread, Block& block, std::function<void()>& body) {
  constexpr size_t kStack = 64 << 10;
  auto fibre = std::make_unique<Fibre>();
  fibre->stack = std::make_unique_for_overwrite<char[]>(kStack);
  fibre->thread = thread;
  fibre->block = &block;
  fibre->body = &body;
  getcontext(&fibre->context);
  fibre->context.uc_stack.ss_sp = fibre->stack.get();
  fibre->context.uc_stack.ss_size = kStack;
  fibre->context.uc_link = nullptr;
  const auto run = [] {
    (*current->body)();
    current->done = true;
    pause();
  };
  makecontext(&fibre->context, run, 0);
  return fibre;
}

// Runs each rank's launches, one after the other, all ranks at the same time. False where a kernel gave up.
inline bool run_streams(const std::vector<std::vector<Launch>>& streams, unsigned seed) {
  struct Running {
    size_t next = 0;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Fibre>> fibres;
    std::function<void()> body;
  };
  std::vector<Running> ranks(streams.size());
  std::mt19937 random(seed);
  gave_up = false;
  const auto start = [&](size_t r) {
    Running& rank = ranks[r];
    const Launch& launch = streams[r][rank.next++];
    rank.blocks.clear();
    rank.fibres.clear();
    rank.body = [&launch] { launch.body(current->block->shared.data()); };
    for (unsigned b = 0; b < launch.blocks; ++b) {
      rank.blocks.push_back(std::make_unique<Block>(Block{{b},
                                                          {launch.threads},
                                                          {launch.blocks},
                                                          std::vector<int>(static_cast<size_t>(launch.shared_ints), -1),
                                                          std::vector<Warp>(launch.threads / 32)}));
      for (unsigned t = 0; t < launch.threads; ++t) {
        rank.fibres.push_back(make_fibre({t}, *rank.blocks.back(), rank.body));
      }
    }
  };
  for (bool more = true; more && !gave_up;) {
    more = false;
    for (size_t r = 0; r < ranks.size(); ++r) {
      bool running = false;
      for (const auto& fibre : ranks[r].fibres) running = running || !fibre->done;
      if (!running && ranks[r].next < streams[r].size()) {
        start(r);
        running = true;
      }
      more = more || running;
      if (!running) continue;
      // Now and then a block or a warp sleeps, for as long as others need for a good part of their work.
      for (const auto& block : ranks[r].blocks) {
        if (random() % 32 == 0) block->sleeps = static_cast<int>(random() % 64);
        if (random() % 32 == 0) block->warps[random() % block->warps.size()].sleeps = static_cast<int>(random() % 32);
        block->sleeps -= block->sleeps > 0;
        for (Warp& warp : block->warps) warp.sleeps -= warp.sleeps > 0;
      }
      std::vector<Fibre*> order;
      for (const auto& fibre : ranks[r].fibres) {
        const Block& block = *fibre->block;
        if (block.sleeps == 0 && block.warps[fibre->thread.x / 32].sleeps == 0) order.push_back(fibre.get());
      }
      std::shuffle(order.begin(), order.end(), random);
      for (Fibre* fibre : order) {
        if (fibre->done || gave_up || random() % 8 == 0) continue;
        ++turns;
        current = fibre;
        swapcontext(&scheduler, &fibre->context);
      }
    }
  }
  return !gave_up;
}

}  // namespace marrow::test

// What device code says.
#define __device__
#define __forceinline__ inline
#define threadIdx (marrow::test::current->thread)
#define blockIdx (marrow::test::current->block->index)
#define blockDim (marrow::test::current->block->size)
#define gridDim (marrow::test::current->block->blocks)
inline void __syncthreads() {
  marrow::test::Block& block = *marrow::test::current->block;
  const unsigned passed = block.passed;
  if (++block.arrived == block.size.x) {
    block.arrived = 0;
    ++block.passed;
  }
  while (block.passed == passed) marrow::test::pause();
}
inline void __syncwarp() { marrow::test::exchange(0); }
inline unsigned __match_any_sync(unsigned, int value) {
  const uint32_t* all = marrow::test::exchange(static_cast<uint32_t>(value));
  unsigned same = 0;
  for (unsigned i = 0; i < 32; ++i) same |= all[i] == static_cast<uint32_t>(value) ? 1u << i : 0;
  return same;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint32_t* all = marrow::test::exchange(value);
  unsigned set = 0;
  for (unsigned i = 0; i < 32; ++i) set |= all[i] << i;
  return set;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const uint32_t* all = marrow::test::exchange(value);
  unsigned any = 0;
  for (unsigned i = 0; i < 32; ++i) any |= all[i];
  return any;
}
inline int __shfl_sync(unsigned, int value, int lane) {
  return static_cast<int>(marrow::test::exchange(static_cast<uint32_t>(value))[lane]);
}
inline int __popc(unsigned value) { return std::popcount(value); }
inline int __ffs(unsigned value) { return value == 0 ? 0 : std::countr_zero(value) + 1; }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline void atomicAdd(int* to, int value) { *to += value; }

namespace marrow::nvlink {

inline void store_flag(uint32_t* flag, uint32_t value) {
  test::pause();  // the others see what was written before; some time later the flag
  *flag = value;
}
inline uint32_t load_flag(const uint32_t* flag) {
  test::pause();
  return *flag;
}
inline uint64_t nanoseconds() { return test::turns; }
inline void give_up() {
  test::gave_up = true;
  for (;;) test::pause();
}
inline uint4 load_once(const uint4* from) { return *from; }
inline void store_once(uint4* to, uint4 value) { *to = value; }
inline uint32_t to_bf16(float low, float high) {  // finite values, to the nearest, ties to even
  const auto round = [](float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  return round(low) | round(high) << 16;
}

}  // namespace marrow::nvlink
