#include "ops/expert_permutation.h"

#include "ops/cuda_launch.h"
#include "ops/expert_permutation_cuda.h"

namespace marrow {
namespace {

void sort_pairs_cpu(const at::Tensor& experts, int64_t expert_count,
                    const ExpertPermutation& result) {
  const int64_t pairs = experts.numel(), top_k = experts.size(1);
  const auto* expert_of = experts.const_data_ptr<int32_t>();
  const auto valid = [&](int64_t i) { return expert_of[i] >= 0 && expert_of[i] < expert_count; };
  auto* ends = result.offsets.mutable_data_ptr<int32_t>();
  auto* source = result.map.source_of_row.mutable_data_ptr<int32_t>();
  auto* rows = result.map.rows_of_source.mutable_data_ptr<int32_t>();
  auto* slots = result.slot_of_row.mutable_data_ptr<int32_t>();
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

ExpertPermutation expert_permutation(const at::Tensor& experts, int64_t expert_count) {
  const Fix fix("pass the router's experts [T, k]; use fewer than 2^31 / k tokens a micro-batch");
  MARROW_CHECK(experts.dim() == 2 && experts.scalar_type() == at::kInt && experts.is_contiguous() &&
                   experts.size(1) > 0 && experts.numel() < (int64_t{1} << 31),
               ExitCode::kUsage, fix, "experts must be contiguous int32 [T, k], not {} {}",
               c10::str(experts.sizes()), c10::toString(experts.scalar_type()));
  MARROW_CHECK(expert_count > 0 && expert_count <= 1024, ExitCode::kUsage,
               Fix("use a model with at most 1024 experts a layer"),
               "{} experts are outside [1, 1024]", expert_count);
  const int64_t pairs = experts.numel();
  const ExpertPermutation result{
      {at::empty({pairs}, experts.options()), at::empty(experts.sizes(), experts.options())},
      at::empty({expert_count}, experts.options()),
      at::empty({pairs}, experts.options())};
  if (experts.is_cpu()) {
    sort_pairs_cpu(experts, expert_count, result);
    return result;
  }
  const int64_t blocks = (pairs + kPairsPerBlock - 1) / kPairsPerBlock;
  const at::Tensor block_rows = at::empty({blocks, expert_count}, experts.options());
  MARROW_CUDA_CALL(expert_permutation_cuda(
      experts.const_data_ptr<int32_t>(), pairs, experts.size(1), expert_count,
      block_rows.mutable_data_ptr<int32_t>(), result.offsets.mutable_data_ptr<int32_t>(),
      result.map.source_of_row.mutable_data_ptr<int32_t>(),
      result.map.rows_of_source.mutable_data_ptr<int32_t>(),
      result.slot_of_row.mutable_data_ptr<int32_t>(), current_cuda_stream()));
  return result;
}

}  // namespace marrow
