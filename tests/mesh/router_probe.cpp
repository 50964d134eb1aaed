#include "mesh/router_probe.h"

#include "ops/router.h"

// The linker renames calls of marrow::router to __wrap_…, and the function itself to __real_….
#define ROUTER_SYMBOL                                                                                                \
  "_ZN6marrow6routerERKN2at6TensorERKNS_9ParameterES3_lRKNS_13RouterOptionsESt10shared_ptrINS_13RouterBalanceEERNS_" \
  "15WeightGradQueueE"

namespace marrow::test {
namespace {
constexpr double kNone = std::numeric_limits<double>::infinity();
double least_gap = kNone;
std::vector<int64_t> forced;
}  // namespace

double take_least_router_gap() { return std::exchange(least_gap, kNone); }
void force_router(std::vector<int64_t> experts) { forced = std::move(experts); }

RouterOutput real_router(const at::Tensor& x, const Parameter& weight, const at::Tensor& selection_bias, int64_t groups,
                         const RouterOptions& options, std::shared_ptr<RouterBalance> balance,
                         WeightGradQueue& queue) asm("__real_" ROUTER_SYMBOL);

RouterOutput seen_router(const at::Tensor& x, const Parameter& weight, const at::Tensor& selection_bias, int64_t groups,
                         const RouterOptions& options, std::shared_ptr<RouterBalance> balance,
                         WeightGradQueue& queue) asm("__wrap_" ROUTER_SYMBOL);
RouterOutput seen_router(const at::Tensor& x, const Parameter& weight, const at::Tensor& selection_bias, int64_t groups,
                         const RouterOptions& options, std::shared_ptr<RouterBalance> balance, WeightGradQueue& queue) {
  at::Tensor bias = selection_bias;
  if (!forced.empty()) {
    bias = at::zeros({weight.value.size(0)}, x.options().dtype(at::kFloat));
    for (const int64_t expert : forced) bias[expert].fill_(10);  // probabilities are at most 1
  } else if (x.numel() > 0 && options.top_k < weight.value.size(0)) {
    const at::NoGradGuard no_grad;
    at::Tensor logits = at::matmul(x.to(at::kFloat), weight.value.to(at::kFloat).t());
    if (options.bias.value.defined()) logits += options.bias.value;
    const at::Tensor best = std::get<0>(at::topk(logits, options.top_k + 1));
    least_gap =
        std::min(least_gap, (best.select(1, options.top_k - 1) - best.select(1, options.top_k)).min().item<double>());
  }
  return real_router(x, weight, bias, groups, options, std::move(balance), queue);
}

}  // namespace marrow::test
