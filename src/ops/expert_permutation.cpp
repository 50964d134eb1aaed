#include "ops/expert_permutation.h"

#include "ops/op_tools.h"

namespace marrow {
namespace {

void sort_pairs_cpu(const Tensor& experts, int64_t expert_count, const ExpertPermutation& result) {
  const int64_t pairs = experts.numel(), top_k = experts.size(1);
  const int32_t* expert_of = ints(experts);
  const auto valid = [&](int64_t i) { return expert_of[i] >= 0 && expert_of[i] < expert_count; };
  int32_t *ends = ints(result.offsets), *source = ints(result.map.source_of_row);
  int32_t *rows = ints(result.map.rows_of_source), *slots = ints(result.slot_of_row);
  std::vector<int32_t> next(expert_count + 1, 0);  // next[e] becomes the next free row of e
  for (int64_t i = 0; i < pairs; ++i) {
    if (valid(i)) ++next[expert_of[i] + 1];
  }
  for (int64_t e = 0; e < expert_count; ++e) ends[e] = next[e + 1] += next[e];
  for (int64_t i = 0; i < pairs; ++i) {
    rows[i] = valid(i) ? next[expert_of[i]]++ : -1;
    if (rows[i] < 0) continue;
    source[rows[i]] = static_cast<int32_t>(i / top_k);
    slots[rows[i]] = static_cast<int32_t>(i);
  }
  std::fill(source + ends[expert_count - 1], source + pairs, -1);
  std::fill(slots + ends[expert_count - 1], slots + pairs, -1);
}

}  // namespace

ExpertPermutation expert_permutation(const Tensor& experts, int64_t expert_count) {
  check_tensor("expert_permutation: experts", experts, at::kInt, {-1, -1});
  MARROW_CHECK(experts.size(1) > 0 && experts.numel() < (int64_t{1} << 31), ExitCode::kUsage,
               Fix("lower train.micro_batch: fewer than 2^31 / k tokens a micro-batch"),
               "expert_permutation: experts are {}", c10::str(experts.sizes()));
  MARROW_CHECK(expert_count > 0 && expert_count <= 1024, ExitCode::kUsage,
               Fix("use a model with at most 1024 experts a layer"), "{} experts are outside [1, 1024]", expert_count);
  const int64_t pairs = experts.numel();
  const ExpertPermutation result{{at::empty({pairs}, experts.options()), at::empty(experts.sizes(), experts.options())},
                                 at::empty({expert_count}, experts.options()),
                                 at::empty({pairs}, experts.options())};
  if (experts.is_cpu()) {
    sort_pairs_cpu(experts, expert_count, result);
    return result;
  }
  const int64_t blocks = (pairs + kPairsPerBlock - 1) / kPairsPerBlock;
  const Tensor block_rows = at::empty({blocks, expert_count}, experts.options());
  MARROW_CUDA_CALL(expert_permutation_cuda(experts, block_rows, result.offsets, result.map.source_of_row,
                                           result.map.rows_of_source, result.slot_of_row));
  return result;
}

}  // namespace marrow
