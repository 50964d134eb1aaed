// Activations that are made again for the backward instead of kept: their memory goes, their handles stay.
#pragma once
#include "ops/pch.h"

namespace marrow {

// Gives the memory of a tensor back; whatever shares it loses it too.
void release_memory(const at::Tensor& tensor);

class RecomputeList {
 public:
  // `make` gives tensors of the values and layout of `made`, each alone on its memory, from what is kept anyway.
  void add(std::vector<at::Tensor> made, std::function<std::vector<at::Tensor>()> make);
  // When the forward has read them, and before the backward does. Operators that saved a tensor see it as it was.
  void release() const;
  void restore();

 private:
  struct Entry {
    std::vector<at::Tensor> made;
    std::function<std::vector<at::Tensor>()> make;
  };
  std::vector<Entry> entries_;
};

}  // namespace marrow
