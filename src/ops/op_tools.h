// What the C++ side of every operator shares: checks, the autograd node, the way to the CUDA kernels.
#pragma once
#include "ops/pch.h"
// After the precompiled header:
#include "ops/cuda_kernels.h"

namespace marrow {

using at::Tensor;
using torch::autograd::variable_list;

constexpr at::ScalarType kWorkingDtype = at::ScalarType::Undefined;  // fp32 or bf16

// Throws unless the tensor is contiguous, of this type and of these sizes (-1: any), and on this device, if given.
void check_tensor(std::string_view name, const Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes,
                  std::optional<at::Device> device = std::nullopt);

// Throws unless starts is int32 [segments + 1] on this device and, where that is the CPU, ascends from 0 to `tokens`.
// (A GPU's offsets stay on the GPU.)
void check_segments(std::string_view name, const Tensor& starts, int64_t tokens, at::Device device);

inline float* floats(const Tensor& x) { return x.defined() ? x.data_ptr<float>() : nullptr; }
inline int32_t* ints(const Tensor& x) { return x.data_ptr<int32_t>(); }

// Gradients of an operator's outputs (all defined) → those of its inputs; undefined: none.
using Backward = std::function<variable_list(const variable_list&)>;

// The outputs, computed from detached inputs, as an operator on `inputs` (some may be undefined) whose backward this
// is. What `backward` captures is freed right after it ran: it captures detached tensors, or the outputs as given.
variable_list differentiable(const variable_list& inputs, variable_list outputs, Backward backward);

}  // namespace marrow

// Runs `call` where CUDA was built in; elsewhere a CUDA tensor cannot exist, and reaching this is an error. Keeps
// NAME.cpp free of #ifdef.
#ifdef MARROW_CUDA
#define MARROW_CUDA_CALL(call) call
#else
#define MARROW_CUDA_CALL(call)                                                                 \
  do {                                                                                         \
    (void)sizeof(((call), 0)); /* its operands count as used */                                \
    MARROW_THROW(::marrow::ExitCode::kDeviceFault, ::marrow::Fix("build with the gpu preset"), \
                 "a CUDA tensor reached a build without CUDA kernels");                        \
  } while (false)
#endif
