// The experts' products in fp8: CUTLASS's grouped product of Hopper with a scale for each row's 128 elements of A and
// each 128 × 128 of B.
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/detail/blockwise_scale_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "ops/fp8_scale.h"
#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

using cute::_1, cute::_2, cute::_128;
using Shape = cute::Shape<int, int, int>;  // of an expert's product: rows and columns of D, and what is summed over
using Fp8 = cutlass::float_e4m3_t;
using Out = cutlass::bfloat16_t;
using Tile = cute::Shape<_128, _128, _128>;
using Cluster = cute::Shape<_1, _2, _1>;
using RowMajor = cutlass::layout::RowMajor*;
using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, kFp8Block, kFp8Block>;
using ScalesOfA = decltype(Scales::deduce_layoutSFA());
using ScalesOfB = decltype(Scales::deduce_layoutSFB());

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    float, float, void, RowMajor, 8, Out, RowMajor, 8, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
    cutlass::epilogue::fusion::LinearCombination<Out, float, Out, float>>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Fp8, cute::tuple<RowMajor, ScalesOfA*>, 16, Fp8,
    cute::tuple<cutlass::layout::ColumnMajor*, ScalesOfB*>, 16, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Shape>, Mainloop, Epilogue>;
using Product = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

// What the kernel reads of the experts, arrays [E] on the device. It finds the layouts of the scales by the shapes.
struct Arrays {
  Shape* shape;
  const Fp8** a;
  const Fp8** b;
  const float** a_scale;
  const float** b_scale;
  Out** d;
  typename Kernel::InternalStrideA* a_stride;
  typename Kernel::InternalStrideB* b_stride;
  typename Kernel::InternalStrideD* d_stride;
  ScalesOfA* a_layout;
  ScalesOfB* b_layout;
};

// One block, one thread an expert. One without rows has no tile.
__global__ void describe_experts(Arrays to, const int32_t* offsets, const Fp8* rows, const float* rows_scale,
                                 const Fp8* weight, const float* weight_scale, Out* out, int n, int k) {
  const int64_t e = threadIdx.x, begin = e == 0 ? 0 : offsets[e - 1];
  const int64_t across = (k + kFp8Block - 1) / kFp8Block, down = (n + kFp8Block - 1) / kFp8Block;
  const int m = static_cast<int>(offsets[e] - begin);
  to.shape[e] = {m, n, k};
  to.a[e] = rows + begin * k;
  to.b[e] = weight + e * n * k;
  to.a_scale[e] = rows_scale + begin * across;
  to.b_scale[e] = weight_scale + e * down * across;
  to.d[e] = out + begin * n;
  cute::get<0>(to.a_stride[e]) = k;
  cute::get<0>(to.b_stride[e]) = k;
  cute::get<0>(to.d_stride[e]) = n;
  to.a_layout[e] = Scales::tile_atom_to_shape_SFA(cute::make_shape(m, n, k, 1));
  to.b_layout[e] = Scales::tile_atom_to_shape_SFB(cute::make_shape(m, n, k, 1));
}

char* place(Arrays& arrays, int64_t experts, char* memory) {
  const auto take = [&](auto*&... array) {
    const auto one = [&](auto*& pointer) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory);
      memory += (experts * static_cast<int64_t>(sizeof(*pointer)) + 255) / 256 * 256;
    };
    (one(array), ...);
  };
  auto& [shape, a, b, a_scale, b_scale, d, a_stride, b_stride, d_stride, a_layout, b_layout] = arrays;
  take(shape, a, b, a_scale, b_scale, d, a_stride, b_stride, d_stride, a_layout, b_layout);
  return memory;
}

}  // namespace

void grouped_fp8_cuda(View rows, View rows_scale, View weight, View weight_scale, View offsets, View out,
                      View workspace) {
  const int64_t experts = offsets.elements;
  const int n = static_cast<int>(out.width), k = static_cast<int>(rows.width);
  Arrays arrays{};
  char* rest = place(arrays, experts, workspace);
  describe_experts<<<1, static_cast<unsigned>(experts), 0, current_stream()>>>(arrays, offsets, rows, rows_scale,
                                                                               weight, weight_scale, out, n, k);
  MARROW_CUDA_CHECK(cudaGetLastError());
  cutlass::KernelHardwareInfo hardware;
  MARROW_CUDA_CHECK(cudaGetDevice(&hardware.device_id));
  MARROW_CUDA_CHECK(cudaDeviceGetAttribute(&hardware.sm_count, cudaDevAttrMultiProcessorCount, hardware.device_id));
  typename Product::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGrouped,
                                        {static_cast<int>(experts), arrays.shape, nullptr},
                                        {arrays.a, arrays.a_stride, arrays.b, arrays.b_stride, arrays.a_scale,
                                         arrays.a_layout, arrays.b_scale, arrays.b_layout},
                                        {{}, nullptr, nullptr, arrays.d, arrays.d_stride},
                                        hardware};
  arguments.epilogue.thread.alpha = 1;
  arguments.epilogue.thread.beta = 0;
  const auto free = static_cast<char*>(workspace) + workspace.elements - rest;
  const bool fits = free >= static_cast<int64_t>(Product::get_workspace_size(arguments));
  const cutlass::Status status =
      fits ? Product()(arguments, rest, current_stream()) : cutlass::Status::kErrorWorkspaceNull;
  if (status != cutlass::Status::kSuccess) {
    throw_cuda_error("a product of the experts in fp8", cutlassGetStatusString(status), __FILE__, __LINE__);
  }
}

}  // namespace marrow
