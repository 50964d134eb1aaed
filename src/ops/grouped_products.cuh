// What CUTLASS's grouped products share: the experts' arrays in a workspace, and the start of a product.
#pragma once
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "ops/kernel_tools.cuh"

namespace marrow {

using GroupedShape = cute::Shape<int, int, int>;  // of an expert's product: rows and columns of D, what is summed over
using RowMajor = cutlass::layout::RowMajor*;
using ColumnMajor = cutlass::layout::ColumnMajor*;

// Lays arrays [experts] one behind another; → the memory behind them.
template <class... Arrays>
char* place(char* memory, int64_t experts, Arrays*&... arrays) {
  const auto one = [&](auto*& array) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory);
    memory += (experts * static_cast<int64_t>(sizeof(*array)) + 255) / 256 * 256;
  };
  (one(arrays), ...);
  return memory;
}

inline cutlass::KernelHardwareInfo this_gpu() {
  cutlass::KernelHardwareInfo hardware;
  MARROW_CUDA_CHECK(cudaGetDevice(&hardware.device_id));
  hardware.sm_count = multiprocessors();
  return hardware;
}

// rest: of the workspace, behind the arrays.
template <class Product>
void start_product(const typename Product::Arguments& arguments, char* rest, const View& workspace) {
  const auto free = static_cast<char*>(workspace) + workspace.elements - rest;
  const bool fits = free >= static_cast<int64_t>(Product::get_workspace_size(arguments));
  const cutlass::Status status =
      fits ? Product()(arguments, rest, current_stream()) : cutlass::Status::kErrorWorkspaceNull;
  if (status != cutlass::Status::kSuccess) {
    throw_cuda_error("a product of the experts", cutlass::cutlassGetStatusString(status), __FILE__, __LINE__);
  }
}

}  // namespace marrow
