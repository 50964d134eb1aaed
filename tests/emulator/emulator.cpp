#include "emulator/emulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <utility>

// Saves where the caller is and goes on where another stack was left.
extern "C" void emulator_switch(char** save, char* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

extern "C" void __sanitizer_set_death_callback(void (*callback)());

namespace emulator {

Thread* current;
const char *kernel, *kernel_signature;
dim3 block_index, block_size, grid_size;
unsigned char* shared_memory;
size_t shared_bytes;
int first_order, order;

namespace {

constexpr size_t kStackBytes = 128 << 10, kGuardBytes = 4 << 10;
constexpr size_t kMostShared = 227 << 10, kSharedUnasked = 48 << 10;  // of a block, on Hopper

struct Warp {
  alignas(kSlot) unsigned char values[2][32][kSlot];
  int64_t complete = 0;  // exchanges that all lanes have come to
  unsigned arrived = 0, line = 0;
};

std::mutex running;  // ATen calls backwards from a thread of its own
const std::function<void()>* body;
char* scheduler;
std::vector<Thread> threads;
std::vector<Warp> warps;
std::vector<char*> stacks;  // that no thread has
int error;

struct SharedVariable {
  Where where;
  size_t bytes;
  void* memory;
};
std::vector<SharedVariable> shared_variables;  // of this launch
std::map<const void*, size_t> shared_limits;
std::map<const void*, int> launches;       // of each instantiation
std::map<std::string, int> most_launches;  // of a kernel's instantiations

std::mutex memory_lock;
std::map<uintptr_t, size_t> pieces;

std::set<std::string>& listed() {  // filled before main
  static std::set<std::string> all;
  return all;
}

std::string place() {
  if (kernel == nullptr) return "outside of kernels";
  const auto text = [](const dim3& d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
  };
  return std::string(kernel_signature) + ", block " + text(block_index) +
         (current != nullptr ? ", thread " + text(current->index) : std::string()) + ", order " + std::to_string(order);
}

[[noreturn]] void thread_main() {
  (*body)();
  current->state = State::kDone;
  emulator_switch(&current->stack_pointer, scheduler);
  std::abort();
}

void pause(State state) {
  current->state = state;
  emulator_switch(&current->stack_pointer, scheduler);
}

void start(Thread& thread) {
  if (stacks.empty()) {
    void* memory =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(memory != MAP_FAILED && mprotect(memory, kGuardBytes, PROT_NONE) == 0, "no memory for a stack");
    stacks.push_back(static_cast<char*>(memory));
  }
  thread.stack = stacks.back();
  stacks.pop_back();
  // As emulator_switch leaves a stack: six registers, where to return to, and that one's return address.
  auto* top = reinterpret_cast<void**>(thread.stack + kStackBytes) - 8;
  std::fill_n(top, 8, nullptr);
  top[6] = reinterpret_cast<void*>(&thread_main);
  thread.stack_pointer = reinterpret_cast<char*>(top);
}

void resume(Thread& thread) {
  if (thread.stack == nullptr) start(thread);
  current = &thread;
  thread.state = State::kReady;
  emulator_switch(&scheduler, thread.stack_pointer);
  current = nullptr;
  if (thread.state != State::kDone) return;
  stacks.push_back(thread.stack);
  thread.stack = nullptr;
}

// 0 … count − 1 in the order that is tried, of warps or of a warp's lanes: 32 at most.
struct Ordered {
  template <typename Random>
  Ordered(size_t count, Random& random) : count(count) {
    std::iota(begin(), end(), 0u);
    if (order == 1) std::reverse(begin(), end());
    if (order > 1) std::shuffle(begin(), end(), random);
  }
  unsigned* begin() { return all; }
  unsigned* end() { return all + count; }
  size_t count;
  unsigned all[32];
};

// Until all its threads are done or at a barrier.
template <typename Random>
void run_warp(size_t index, Random& random) {
  Thread* lanes = &threads[index * 32];
  Ordered turns(std::min<size_t>(32, threads.size() - index * 32), random);
  for (bool moved = true, waits = true; waits;) {
    if (!moved) fail("lanes wait at a shuffle or the like for others, which returned or are at a barrier");
    moved = waits = false;
    for (const unsigned lane : turns) {
      Thread& thread = lanes[lane];
      if (thread.state == State::kReady ||
          (thread.state == State::kAtExchange && thread.exchanges <= warps[index].complete)) {
        resume(thread);
        moved = true;
      }
      waits = waits || thread.state == State::kAtExchange || thread.state == State::kReady;
    }
  }
}

template <typename Random>
void run_block(Random& random) {
  std::memset(shared_memory, 0xff, shared_bytes);
  for (const SharedVariable& each : shared_variables) std::memset(each.memory, 0xff, each.bytes);
  warps.resize((threads.size() + 31) / 32);
  for (Warp& warp : warps) warp.complete = warp.arrived = 0;
  for (unsigned i = 0; i < threads.size(); ++i) {
    Thread& thread = threads[i];
    thread.index = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
    thread.linear = i;
    thread.state = State::kReady;
    thread.exchanges = 0;
    thread.open.clear();
    if (!thread.groups.empty()) thread.groups.clear();
  }
  for (unsigned line = 1; line != 0;) {
    for (const unsigned warp : Ordered(warps.size(), random)) run_warp(warp, random);
    line = 0;
    for (Thread& thread : threads) {
      if (thread.state != State::kAtBarrier) continue;
      if (line == 0) line = thread.line;
      current = &thread;
      check(thread.line == line, "threads of a block wait at different barriers");
      current = nullptr;
      thread.state = State::kReady;
    }
  }
}

}  // namespace

void fail(const std::string& what, Where where) {
  std::fprintf(stderr, "\nEMULATOR: %s\n  in %s\n  at %s:%u\n", what.c_str(), place().c_str(), where.file_name(),
               static_cast<unsigned>(where.line()));
  std::abort();
}

void barrier(Where where) {
  current->line = where.line();
  pause(State::kAtBarrier);
}

unsigned char* slots() { return warps[current->linear / 32].values[(current->exchanges + 1) % 2][0]; }

void meet(unsigned mask, Where where) {
  check(mask == ~0u, "the emulator knows masks of whole warps alone", where);
  const unsigned index = current->linear / 32;
  check((index + 1) * 32 <= threads.size(), "a mask names lanes that the block does not have", where);
  Warp& warp = warps[index];
  ++current->exchanges;
  if (warp.arrived == 0) warp.line = where.line();
  check(warp.line == where.line(), "lanes of a warp meet at different shuffles or the like", where);
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.complete;
  } else {
    pause(State::kAtExchange);
  }
}

void* shared_variable(size_t bytes, Where where) {
  for (const SharedVariable& each : shared_variables) {
    if (each.where.line() == where.line() && each.where.file_name() == where.file_name()) return each.memory;
  }
  void* memory = nullptr;
  check(posix_memalign(&memory, 16, bytes) == 0, "no shared memory");
  std::memset(memory, 0xff, bytes);
  shared_variables.push_back({where, bytes, memory});
  return memory;
}

void* allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* memory = nullptr;
  check(posix_memalign(&memory, 256, bytes) == 0, "no memory for the device");
  std::memset(memory, 0xff, bytes);
  const std::lock_guard lock(memory_lock);
  pieces[reinterpret_cast<uintptr_t>(memory)] = bytes;
  return memory;
}

void release(void* memory) {
  const std::lock_guard lock(memory_lock);
  pieces.erase(reinterpret_cast<uintptr_t>(memory));
  std::free(memory);
}

bool owns(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard lock(memory_lock);
  const auto next = pieces.upper_bound(address);
  return next != pieces.begin() && address <= std::prev(next)->first + std::prev(next)->second;
}

int take_error() { return std::exchange(error, 0); }

int allow_shared_memory(const void* function, size_t bytes) {
  if (bytes > kMostShared) return 1;
  shared_limits[function] = bytes;
  return 0;
}

bool accepts(const Config& config, const void* function) {
  const auto limit = shared_limits.find(function);
  const size_t most = limit == shared_limits.end() ? kSharedUnasked : std::max(limit->second, kSharedUnasked);
  const bool fits = config.grid.count() > 0 && config.grid.x < 1u << 31 && config.grid.y < 65536 &&
                    config.grid.z < 65536 && config.block.count() > 0 && config.block.count() <= 1024 &&
                    config.block.z <= 64 && config.shared <= most;
  if (!fits) error = 9;  // cudaErrorInvalidConfiguration
  return fits;
}

void run(const Config& config, const void* function, const std::function<void()>& thread) {
  const std::lock_guard lock(running);
  const int launch = launches[function]++;
  order = first_order < 2 ? (first_order + launch) % 2 : 2 * first_order + launch % 2;
  __sanitizer_set_death_callback([] { std::fprintf(stderr, "EMULATOR: in %s\n", place().c_str()); });
  body = &thread;
  grid_size = config.grid;
  block_size = config.block;
  shared_bytes = config.shared;
  void* memory = nullptr;
  check(posix_memalign(&memory, 128, std::max<size_t>(shared_bytes, 1)) == 0, "no shared memory");
  shared_memory = static_cast<unsigned char*>(memory);
  threads.resize(config.block.count());
  std::mt19937 random(static_cast<unsigned>(order));
  const size_t blocks = config.grid.count();
  for (size_t i = 0; i < blocks; ++i) {
    const size_t block = order % 2 == 1 ? blocks - 1 - i : i;
    block_index =
        dim3(static_cast<unsigned>(block % grid_size.x), static_cast<unsigned>(block / grid_size.x % grid_size.y),
             static_cast<unsigned>(block / grid_size.x / grid_size.y));
    run_block(random);
  }
  std::free(memory);
  for (const SharedVariable& each : shared_variables) std::free(each.memory);
  shared_variables.clear();
  int& most = most_launches[kernel];
  most = std::max(most, launch + 1);
}

Listed::Listed(const char* name) { listed().insert(name); }

std::vector<std::string> kernels_not_launched() {
  std::vector<std::string> missing;
  std::copy_if(listed().begin(), listed().end(), std::back_inserter(missing),
               [](const std::string& name) { return most_launches[name] < 2; });
  return missing;
}

}  // namespace emulator
