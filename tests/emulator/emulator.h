// Runs the CUDA kernels of src/ops on the CPU, for tests without a GPU: test_kernels is test_ops on an emulated device.
// translate.py makes C++ of a .cu file, include/ has what such files include, device.cpp gives ATen a device cuda:0 in
// host memory, so that the operators and their tests take the same way as on a GPU. A thread is a fibre; a warp runs
// until its next barrier, its lanes in step at shuffles, then the next warp does. A kernel's launches take turns with
// two orders of blocks, warps and lanes, the second the reverse of the first, with asynchronous copies as late and as
// early as may be. --gtest_repeat=2 runs all once more the other way round, a higher number adds orders at random.
//
// What a pass proves: indices and bounds, by the address sanitizer, of a tensor's memory to the byte and of shared
// arrays; no use of memory that nobody wrote, as far as NaN in it (all of it is NaN at first) reaches a result;
// alignment of vector accesses; no barrier missing where one of the orders shows it; no lane missing at a shuffle;
// launch sizes; no pointer to host memory; arithmetic within the tests' tolerances; every kernel was launched.
// What it does not: the memory model (a race that none of the orders shows; fences), bounds within one struct of shared
// memory, the use of device memory by the host, registers and spills, what the compiler for the GPU makes of it, speed.
// Of PTX it knows what ptx.h has, and nothing of CUTLASS and cuBLAS: cmake/emulator.cmake lists what is left out, and
// why.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  size_t count() const { return size_t{x} * y * z; }
};

// Of what the emulator itself does: not slowed by the sanitizers.
#define EMULATOR_OWN __attribute__((no_sanitize("address", "undefined")))

namespace emulator {

using Where = std::source_location;

// A kernel that a translated file has.
struct Listed {
  explicit Listed(const char* name);
};

struct AsyncCopy {
  void* to;
  const void* from;
  bool zero;
};

enum class State { kReady, kAtExchange, kAtBarrier, kDone };

struct Thread {
  dim3 index;
  unsigned linear = 0;
  State state = State::kReady;
  int64_t exchanges = 0;
  unsigned line = 0;  // of the barrier where it waits
  char *stack = nullptr, *stack_pointer = nullptr;
  std::vector<AsyncCopy> open;
  std::deque<std::vector<AsyncCopy>> groups;

  unsigned lane() const { return linear % 32; }
};

struct Config {
  Config(dim3 grid, dim3 block, size_t shared = 0, void* /*stream*/ = nullptr, Where where = Where::current())
      : grid(grid), block(block), shared(shared), where(where) {}
  dim3 grid, block;
  size_t shared;
  Where where;
};

extern Thread* current;                        // the thread that runs, none outside of kernels
extern const char *kernel, *kernel_signature;  // the last one, as listed
extern dim3 block_index, block_size, grid_size;
extern unsigned char* shared_memory;
extern size_t shared_bytes;
extern int first_order;  // launches of a kernel count from here
extern int order;        // of this one: 0 ascending, 1 descending, more: at random

// Ends the program with `what`, the kernel, block and thread.
[[noreturn]] void fail(const std::string& what, Where where = Where::current());
inline void check(bool holds, const char* what, Where where = Where::current()) {
  if (!holds) fail(what, where);
}

void barrier(Where where);
// A lane puts its value into its slot, kSlot bytes, and meets all others of its warp; the slots are valid until it
// meets them again.
constexpr size_t kSlot = 32;
unsigned char* slots();
void meet(unsigned mask, Where where);

// Memory of the device, filled with 0xff.
void* allocate(size_t bytes);
void release(void* memory);
bool owns(const void* pointer);  // also the end of a piece

// A variable of the block's shared memory, declared there.
void* shared_variable(size_t bytes, Where where);
template <typename T>
T& shared_array(Where where = Where::current()) {
  return *static_cast<T*>(shared_variable(sizeof(T), where));
}

int take_error();  // cudaGetLastError
int allow_shared_memory(const void* function, size_t bytes);
bool accepts(const Config& config, const void* function);  // else an error for take_error
void run(const Config& config, const void* function, const std::function<void()>& thread);

// The listed kernels without a launch in each order.
std::vector<std::string> kernels_not_launched();

template <typename T>
void check_argument(const T& argument, Where where) {
  const void* pointer = nullptr;
  if constexpr (std::is_pointer_v<T>) pointer = argument;
  if constexpr (requires { static_cast<const void*>(argument.data); }) pointer = argument.data;
  check(pointer == nullptr || owns(pointer), "a kernel's argument points to memory that is not the device's", where);
}

template <typename... Parameters, typename... Arguments>
void launch(void (*function)(Parameters...), const Config& config, Arguments&&... arguments) {
  const std::tuple<std::remove_const_t<Parameters>...> parameters(std::forward<Arguments>(arguments)...);
  const auto* address = reinterpret_cast<const void*>(function);
  if (!accepts(config, address)) return;
  std::apply([&](const auto&... each) { (check_argument(each, config.where), ...); }, parameters);
  run(config, address, [&] { std::apply(function, parameters); });
}

}  // namespace emulator

#define EMULATED_KERNEL(listed) ::emulator::kernel = listed, ::emulator::kernel_signature = __PRETTY_FUNCTION__;
