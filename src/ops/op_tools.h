// What the C++ side of every operator shares: checks, autograd state, the way to the CUDA kernels.
#pragma once
#include "ops/pch.h"
// After the precompiled header:
#include "ops/cuda_kernels.h"

namespace marrow {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr at::ScalarType kWorkingDtype = at::ScalarType::Undefined;  // fp32 or bf16

// Throws unless the tensor is contiguous, of this type and of these sizes (-1: any), and on this
// device, if given.
void check_tensor(std::string_view name, const Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes,
                  std::optional<at::Device> device = std::nullopt);

inline float* floats(const Tensor& x) { return x.defined() ? x.data_ptr<float>() : nullptr; }
inline int32_t* ints(const Tensor& x) { return x.data_ptr<int32_t>(); }

// An argument of an autograd Function that may be absent: an undefined tensor is no input of one.
inline std::optional<Tensor> if_defined(const Tensor& x) { return x.defined() ? std::optional(x) : std::nullopt; }

template <typename T>
struct SavedState : torch::CustomClassHolder {
  explicit SavedState(T state) : value(std::move(state)) {}
  T value;
};

// What a Function carries from forward to backward besides activations, one value per context.
// Activations go through ctx->save_for_backward, which frees them right after the backward.
template <typename T>
void save_state(AutogradContext* ctx, T state) {
  ctx->saved_data["state"] = at::IValue::make_capsule(c10::make_intrusive<SavedState<T>>(std::move(state)));
}

template <typename T>
const T& saved_state(AutogradContext* ctx) {
  return static_cast<const SavedState<T>*>(ctx->saved_data["state"].toCapsule().get())->value;
}

}  // namespace marrow

// Runs `call` where CUDA was built in; elsewhere a CUDA tensor cannot exist, and reaching this is
// an error. Keeps NAME.cpp free of #ifdef.
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
