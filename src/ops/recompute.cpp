#include "ops/recompute.h"

namespace marrow {

void release_memory(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(0));
  storage->set_nbytes(size_t{0});
}

void RecomputeList::add(std::vector<at::Tensor> made, std::function<std::vector<at::Tensor>()> make) {
  for (const at::Tensor& tensor : made) {
    MARROW_CHECK(tensor.storage_offset() == 0 && tensor.is_contiguous(), ExitCode::kUsage,
                 Fix("list the tensor whose memory it is; or set train.recompute = \"none\""),
                 "an activation {} is a part of another's memory", c10::str(tensor.sizes()));
  }
  entries_.push_back({std::move(made), std::move(make)});
}

void RecomputeList::release() const {
  for (const Entry& entry : entries_) {
    for (const at::Tensor& tensor : entry.made) release_memory(tensor);
  }
}

// The new memory moves into the old storage: nothing is copied, and to autograd nothing was written.
void RecomputeList::restore() {
  const at::NoGradGuard no_grad;
  for (const Entry& entry : entries_) {
    const std::vector<at::Tensor> again = entry.make();
    for (size_t i = 0; i < again.size(); ++i) {
      const at::Tensor &to = entry.made[i], &from = again[i];
      MARROW_CHECK(from.sizes() == to.sizes() && from.strides() == to.strides() && from.dtype() == to.dtype() &&
                       from.storage_offset() == to.storage_offset(),
                   ExitCode::kUsage, Fix("set train.recompute = \"none\", and report this"),
                   "an activation {} came back as {}", c10::str(to.sizes()), c10::str(from.sizes()));
      c10::StorageImpl *target = to.storage().unsafeGetStorageImpl(), *source = from.storage().unsafeGetStorageImpl();
      target->set_nbytes(source->nbytes());
      target->set_data_ptr_noswap(source->set_data_ptr(source->allocator()->allocate(0)));
    }
  }
  entries_.clear();
}

}  // namespace marrow
