#include "ops/op_tools.h"

#include <torch/csrc/autograd/functions/utils.h>

#ifdef MARROW_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace marrow {
namespace {

struct OperatorNode final : torch::autograd::Node {
  OperatorNode(torch::autograd::edge_list&& inputs, Backward backward)
      : Node(std::move(inputs)), backward(std::move(backward)) {}
  variable_list apply(variable_list&& gradients) override {
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) gradients[i] = input_metadata(i).zeros_like();
    }
    return backward(gradients);
  }
  void release_variables() override { backward = nullptr; }
  Backward backward;
};

}  // namespace

variable_list differentiable(const variable_list& inputs, variable_list outputs, Backward backward) {
  if (!torch::autograd::compute_requires_grad(inputs)) return outputs;
  // New handles: one that `backward` captured must not own the node that owns it.
  for (Tensor& output : outputs) output = output.variable_data();
  const auto node = std::make_shared<OperatorNode>(torch::autograd::collect_next_edges(inputs), std::move(backward));
  torch::autograd::set_history(outputs, node);
  return outputs;
}

void check_tensor(std::string_view name, const Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes,
                  std::optional<at::Device> device) {
  MARROW_CHECK(tensor.defined(), ExitCode::kUsage, Fix("pass this tensor"), "{} is undefined", name);
  const at::ScalarType type = tensor.scalar_type();
  bool fits = dtype == kWorkingDtype ? type == at::kFloat || type == at::kBFloat16 : type == dtype;
  fits = fits && tensor.is_contiguous() && tensor.device() == device.value_or(tensor.device()) &&
         tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = sizes[i] == -1 || sizes[i] == tensor.size(static_cast<int64_t>(i));
  }
  if (fits) return;
  const std::string found = fmt::format("{} {}{} on {}", c10::toString(type), c10::str(tensor.sizes()),
                                        tensor.is_contiguous() ? "" : " with gaps", tensor.device().str());
  Error error(ExitCode::kUsage,
              fmt::format("{} is {}; it must be contiguous {} {} on {} (-1: any size)", name, found,
                          dtype == kWorkingDtype ? "fp32 or bf16" : c10::toString(dtype), c10::str(sizes),
                          device.value_or(tensor.device()).str()),
              Fix("compare config.json with the weights' shapes; set train.dtype to fp32 or bf16"), __FILE__, __LINE__);
  throw error.add_tensor(fmt::format("{} {}", name, found));
}

void check_segments(std::string_view name, const Tensor& starts, int64_t tokens, at::Device device) {
  check_tensor(name, starts, at::kInt, {-1}, device);
  if (!starts.is_cpu()) return;
  const int32_t *from = ints(starts), *to = from + starts.numel();
  MARROW_CHECK(from != to && *from == 0 && to[-1] == tokens && std::is_sorted(from, to), ExitCode::kUsage,
               Fix("pass offsets that ascend from 0 to the number of tokens"), "{}: segments start at {}, {} tokens",
               name, c10::str(starts), tokens);
}

#ifdef MARROW_CUDA
cudaStream_t current_stream();  // these two are declared for .cu files in kernel_tools.cuh
cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

[[noreturn]] void throw_cuda_error(const char* call, const char* status, const char* file, int line);
void throw_cuda_error(const char* call, const char* status, const char* file, int line) {
  throw Error(ExitCode::kDeviceFault, fmt::format("{} failed: {}", call, status),
              Fix("run again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the "
                  "kernel at fault"),
              file, line);
}
#endif

}  // namespace marrow
