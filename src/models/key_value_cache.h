// Keys and values of the tokens generated so far, one pair of tensors a layer.
#pragma once
#include "ops/pch.h"

namespace marrow {

// One sequence. Layers call `attend` in order; `advance` once all layers have seen the new tokens.
class KeyValueCache {
 public:
  KeyValueCache(int64_t layers, int64_t capacity) : keys_(layers), values_(layers), capacity_(capacity) {}

  // Appends keys [T, Hkv, D] and values [T, Hkv, Dv] of layer `layer`, then attends causally from
  // the T new queries [T, Hq, D]. Returns [T, Hq, Dv].
  at::Tensor attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);
  void advance(int64_t tokens) { length_ += tokens; }
  int64_t length() const { return length_; }

 private:
  std::vector<at::Tensor> keys_, values_;  // [capacity, Hkv, D]
  int64_t capacity_;
  int64_t length_ = 0;
};

}  // namespace marrow
