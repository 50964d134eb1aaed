// The experts' weight gradients in fp8: CUTLASS's grouped product of Hopper with a scale for each row's 128 elements on
// both sides, added into fp32 where it is kept (C = D, beta = 1).
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
using Shape = cute::Shape<int, int, int>;  // of an expert's product: N, K, and its rows in whole blocks
using Fp8 = cutlass::float_e4m3_t;
using Tile = cute::Shape<_128, _128, _128>;
using Cluster = cute::Shape<_1, _2, _1>;
using RowMajor = cutlass::layout::RowMajor*;
using ColumnMajor = cutlass::layout::ColumnMajor*;
using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, 1, kFp8Block>;
using ScalesOfA = decltype(Scales::deduce_layoutSFA());
using ScalesOfB = decltype(Scales::deduce_layoutSFB());

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    float, float, float, RowMajor, 4, float, RowMajor, 4, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
    cutlass::epilogue::fusion::LinearCombination<float, float, float, float>>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Fp8, cute::tuple<RowMajor, ScalesOfA*>, 16, Fp8,
    cute::tuple<ColumnMajor, ScalesOfB*>, 16, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Shape>, Mainloop, Epilogue>;
using Product = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

// What the kernel reads of the experts, arrays [E] on the device.
struct Arrays {
  Shape* shape;
  const Fp8** a;
  const Fp8** b;
  const float** a_scale;
  const float** b_scale;
  float** d;
  typename Kernel::InternalStrideA* a_stride;
  typename Kernel::InternalStrideB* b_stride;
  typename Kernel::InternalStrideD* d_stride;
  ScalesOfA* a_layout;
  ScalesOfB* b_layout;
};

struct Operand {
  const Fp8* data;     // [width, P]
  const float* scale;  // [P / 128, width] in memory
  int width;
};

// One block, one thread an expert. One without rows has no tile, so that its gradient stays as it is.
__global__ void describe_experts(Arrays to, const int32_t* offsets, Operand a, Operand b, int64_t padded, float* grad) {
  const int64_t e = threadIdx.x;
  int64_t blocks = 0;  // before the expert's
  int begin = 0, rows = offsets[0];
  for (int64_t i = 0; i < e; ++i) {
    blocks += (rows + kFp8Block - 1) / kFp8Block;
    begin += rows;
    rows = offsets[i + 1] - begin;
  }
  const int whole = static_cast<int>((rows + kFp8Block - 1) / kFp8Block * kFp8Block);
  to.shape[e] = {whole == 0 ? 0 : a.width, b.width, whole};
  to.a[e] = a.data + blocks * kFp8Block;
  to.b[e] = b.data + blocks * kFp8Block;
  to.a_scale[e] = a.scale + blocks * a.width;
  to.b_scale[e] = b.scale + blocks * b.width;
  to.d[e] = grad + e * a.width * b.width;
  cute::get<0>(to.a_stride[e]) = padded;
  cute::get<0>(to.b_stride[e]) = padded;
  cute::get<0>(to.d_stride[e]) = b.width;
  to.a_layout[e] = Scales::tile_atom_to_shape_SFA(cute::make_shape(a.width, b.width, whole, 1));
  to.b_layout[e] = Scales::tile_atom_to_shape_SFB(cute::make_shape(a.width, b.width, whole, 1));
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

void grouped_fp8_weight_grad_cuda(View dy, View dy_scale, View x, View x_scale, View offsets, View grad,
                                  View workspace) {
  const int64_t experts = offsets.elements;
  const Operand a{dy, dy_scale, static_cast<int>(dy.rows)}, b{x, x_scale, static_cast<int>(x.rows)};
  Arrays arrays{};
  char* rest = place(arrays, experts, workspace);
  describe_experts<<<1, static_cast<unsigned>(experts), 0, current_stream()>>>(arrays, offsets, a, b, dy.width, grad);
  MARROW_CUDA_CHECK(cudaGetLastError());
  cutlass::KernelHardwareInfo hardware;
  MARROW_CUDA_CHECK(cudaGetDevice(&hardware.device_id));
  MARROW_CUDA_CHECK(cudaDeviceGetAttribute(&hardware.sm_count, cudaDevAttrMultiProcessorCount, hardware.device_id));
  typename Product::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGrouped,
      {static_cast<int>(experts), arrays.shape, nullptr},
      {arrays.a, arrays.a_stride, arrays.b, arrays.b_stride, arrays.a_scale, arrays.a_layout, arrays.b_scale,
       arrays.b_layout},
      {{}, const_cast<const float**>(arrays.d), arrays.d_stride, arrays.d, arrays.d_stride},
      hardware};
  arguments.epilogue.thread.alpha = 1;
  arguments.epilogue.thread.beta = 1;
  using Raster = decltype(arguments.scheduler.raster_order);
  arguments.scheduler.raster_order = b.width < a.width ? Raster::AlongN : Raster::AlongM;  // along the shorter side
  const auto free = static_cast<char*>(workspace) + workspace.elements - rest;
  const bool fits = free >= static_cast<int64_t>(Product::get_workspace_size(arguments));
  const cutlass::Status status =
      fits ? Product()(arguments, rest, current_stream()) : cutlass::Status::kErrorWorkspaceNull;
  if (status != cutlass::Status::kSuccess) {
    throw_cuda_error("a weight gradient of the experts in fp8", cutlassGetStatusString(status), __FILE__, __LINE__);
  }
}

}  // namespace marrow
