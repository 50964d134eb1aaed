// What an autograd Function carries from forward to backward besides tensors.
#pragma once
#include "ops/pch.h"

namespace marrow {

template <typename T>
struct SavedState : torch::CustomClassHolder {
  explicit SavedState(T state) : value(std::move(state)) {}
  T value;
};

// Activations go through ctx->save_for_backward, which frees them right after the backward; this is
// for parameters, sizes and the like. One per context.
template <typename T>
void save_state(torch::autograd::AutogradContext* ctx, T state) {
  ctx->saved_data["state"] =
      at::IValue::make_capsule(c10::make_intrusive<SavedState<T>>(std::move(state)));
}

template <typename T>
const T& saved_state(torch::autograd::AutogradContext* ctx) {
  return static_cast<const SavedState<T>*>(ctx->saved_data["state"].toCapsule().get())->value;
}

}  // namespace marrow
