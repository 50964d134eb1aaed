// marrow with one fault: MARROW_TEST_FAULT=PLACE:KIND:RANK:CALL makes rank RANK misbehave at its CALL-th call of a
// place. PLACE: init, start, forward, exchange, optimizer, save. KIND: kill, stop, segfault, throw, nan (forward
// alone). The linker renames calls of the functions below to __wrap_…, and the functions themselves to __real_….
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>

#include "models/model_contract.h"
#include "parallel/expert_dispatch.h"
#include "train/optimizer.h"

namespace marrow::test {
namespace {

struct Fault {
  std::string place, kind;
  int64_t rank = -1, call = 0;
};

const Fault& fault() {
  static const Fault read = [] {
    Fault made;
    const char* text = std::getenv("MARROW_TEST_FAULT");
    std::istringstream words(text == nullptr ? "" : text);
    std::string rank, call;
    if (std::getline(words, made.place, ':') && std::getline(words, made.kind, ':') && std::getline(words, rank, ':') &&
        std::getline(words, call)) {
      made.rank = std::stoll(rank);
      made.call = std::stoll(call);
    }
    return made;
  }();
  return read;
}

// True where the fault is one that the caller makes.
bool arrive(std::string_view place) {
  static std::atomic<int64_t> calls = 0;
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (fault().place != place || rank == nullptr || std::stoll(rank) != fault().rank) return false;
  if (++calls != fault().call) return false;
  if (fault().kind == "kill") raise(SIGKILL);
  if (fault().kind == "stop") raise(SIGSTOP);
  if (fault().kind == "segfault") raise(SIGSEGV);
  MARROW_CHECK(fault().kind != "throw", ExitCode::kDeviceFault, Fix("unset MARROW_TEST_FAULT"), "the fault in {}",
               place);
  return true;
}

}  // namespace

#define OPEN_MODEL "_ZN6marrow10open_modelERKNS_4JsonE"
std::unique_ptr<MoeModel> real_open_model(const Json& config) asm("__real_" OPEN_MODEL);
std::unique_ptr<MoeModel> faulty_open_model(const Json& config) asm("__wrap_" OPEN_MODEL);
std::unique_ptr<MoeModel> faulty_open_model(const Json& config) {
  arrive("start");
  return real_open_model(config);
}

#define ROUTER                                                                                                       \
  "_ZN6marrow6routerERKN2at6TensorERKNS_9ParameterES3_lRKNS_13RouterOptionsESt10shared_ptrINS_13RouterBalanceEERNS_" \
  "15WeightGradQueueE"
RouterOutput real_router(const at::Tensor& x, const Parameter& weight, const at::Tensor& selection_bias, int64_t groups,
                         const RouterOptions& options, std::shared_ptr<RouterBalance> balance,
                         WeightGradQueue& queue) asm("__real_" ROUTER);
RouterOutput faulty_router(const at::Tensor& x, const Parameter& weight, const at::Tensor& selection_bias,
                           int64_t groups, const RouterOptions& options, std::shared_ptr<RouterBalance> balance,
                           WeightGradQueue& queue) asm("__wrap_" ROUTER);
RouterOutput faulty_router(const at::Tensor& x, const Parameter& weight, const at::Tensor& selection_bias,
                           int64_t groups, const RouterOptions& options, std::shared_ptr<RouterBalance> balance,
                           WeightGradQueue& queue) {
  const bool not_a_number = arrive("forward");
  RouterOutput out = real_router(x, weight, selection_bias, groups, options, std::move(balance), queue);
  if (not_a_number) out.weights = out.weights * std::numeric_limits<float>::quiet_NaN();
  return out;
}

#define START_DISPATCH "_ZN6marrow14ExpertDispatch14start_dispatchERKN2at6TensorES4_"
void real_dispatch(ExpertDispatch* self, const at::Tensor& tokens,
                   const at::Tensor& weights) asm("__real_" START_DISPATCH);
void faulty_dispatch(ExpertDispatch* self, const at::Tensor& tokens,
                     const at::Tensor& weights) asm("__wrap_" START_DISPATCH);
void faulty_dispatch(ExpertDispatch* self, const at::Tensor& tokens, const at::Tensor& weights) {
  arrive("exchange");
  real_dispatch(self, tokens, weights);
}

#define OPTIMIZER_STEP "_ZN6marrow9Optimizer4stepEdlRKN2at6TensorE"
void real_step(Optimizer* self, double rate, int64_t step, const at::Tensor& loss) asm("__real_" OPTIMIZER_STEP);
void faulty_step(Optimizer* self, double rate, int64_t step, const at::Tensor& loss) asm("__wrap_" OPTIMIZER_STEP);
void faulty_step(Optimizer* self, double rate, int64_t step, const at::Tensor& loss) {
  arrive("optimizer");
  real_step(self, rate, step, loss);
}

}  // namespace marrow::test

extern "C" int PMPI_Init_thread(int*, char***, int, int*);
extern "C" int MPI_Init_thread(int* count, char*** words, int required, int* provided) {
  marrow::test::arrive("init");
  return PMPI_Init_thread(count, words, required, provided);
}

// A rank above 0 syncs nothing but its files of a checkpoint.
extern "C" int fsync(int file) {
  marrow::test::arrive("save");
  return static_cast<int>(syscall(SYS_fsync, file));
}
