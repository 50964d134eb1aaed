// The experts' products in fp8: CUTLASS's grouped products of Hopper with scales. A weight's gradient is added into
// fp32 where it is kept (C = D, beta = 1).
#include "ops/grouped_products.cuh"
// After it:
#include <cutlass/detail/blockwise_scale_layout.hpp>

#include "ops/fp8_scale.h"

namespace marrow {
namespace {

using cute::_1, cute::_2, cute::_128;
using Fp8 = cutlass::float_e4m3_t;
using Tile = cute::Shape<_128, _128, _128>;
using Cluster = cute::Shape<_1, _2, _1>;

// D = A · Bᵀ, or D += A · Bᵀ in fp32, with a scale for each row's 128 elements of A and each kRowsOfB × 128 of B.
template <int kRowsOfB, class D>
struct GroupedFp8 {
  static constexpr bool kAdds = std::is_same_v<D, float>;
  static constexpr int kAlignment = 16 / sizeof(D);
  using Out = D;
  using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, kRowsOfB, kFp8Block>;
  using ScalesOfA = decltype(Scales::deduce_layoutSFA());
  using ScalesOfB = decltype(Scales::deduce_layoutSFB());
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, std::conditional_t<kAdds, D, void>, RowMajor,
      kAlignment, D, RowMajor, kAlignment, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
      cutlass::epilogue::fusion::LinearCombination<D, float, D, float>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Fp8, cute::tuple<RowMajor, ScalesOfA*>, 16, Fp8,
      cute::tuple<ColumnMajor, ScalesOfB*>, 16, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<GroupedShape>, Mainloop, Epilogue>;
  using Product = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  // What the kernel reads of the experts, arrays [E] on the device. It finds the layouts of the scales by the shapes.
  struct Arrays {
    GroupedShape* shape;
    const Fp8** a;
    const Fp8** b;
    const float** a_scale;
    const float** b_scale;
    D** d;
    typename Kernel::InternalStrideA* a_stride;
    typename Kernel::InternalStrideB* b_stride;
    typename Kernel::InternalStrideD* d_stride;
    ScalesOfA* a_layout;
    ScalesOfB* b_layout;

    // Of expert e, whose operands start at these; m, n, k: its shape. ab_stride, n: elements from a row to the next.
    __device__ void set(int64_t e, int m, int n, int k, const Fp8* from_a, const float* scale_a, const Fp8* from_b,
                        const float* scale_b, D* to, int64_t ab_stride) const {
      shape[e] = {k == 0 ? 0 : m, n, k};
      a[e] = from_a;
      b[e] = from_b;
      a_scale[e] = scale_a;
      b_scale[e] = scale_b;
      d[e] = to;
      cute::get<0>(a_stride[e]) = ab_stride;
      cute::get<0>(b_stride[e]) = ab_stride;
      cute::get<0>(d_stride[e]) = n;
      a_layout[e] = Scales::tile_atom_to_shape_SFA(cute::make_shape(m, n, k, 1));
      b_layout[e] = Scales::tile_atom_to_shape_SFB(cute::make_shape(m, n, k, 1));
    }
  };

  static char* place_arrays(Arrays& of, int64_t experts, char* memory) {
    return place(memory, experts, of.shape, of.a, of.b, of.a_scale, of.b_scale, of.d, of.a_stride, of.b_stride,
                 of.d_stride, of.a_layout, of.b_layout);
  }
  static typename Product::Arguments arguments(const Arrays& of, int64_t experts) {
    typename Product::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {static_cast<int>(experts), of.shape, nullptr},
        {of.a, of.a_stride, of.b, of.b_stride, of.a_scale, of.a_layout, of.b_scale, of.b_layout},
        {{}, nullptr, nullptr, of.d, of.d_stride},
        this_gpu()};
    arguments.epilogue.thread.alpha = 1;
    arguments.epilogue.thread.beta = kAdds ? 1 : 0;
    if constexpr (kAdds) {
      arguments.epilogue.ptr_C = const_cast<const float**>(of.d);
      arguments.epilogue.dC = of.d_stride;
    }
    return arguments;
  }
};

using OfRows = GroupedFp8<kFp8Block, cutlass::bfloat16_t>;
using WeightGrad = GroupedFp8<1, float>;

struct Operand {
  const Fp8* data;
  const float* scale;
  int width;  // N or K
};

// These two: one block, one thread an expert. One without rows has no tile.
__global__ void describe_rows(OfRows::Arrays to, const int32_t* offsets, Operand rows, Operand weight,
                              OfRows::Out* out) {
  const int64_t e = threadIdx.x, begin = e == 0 ? 0 : offsets[e - 1];
  const int n = weight.width, k = rows.width, m = static_cast<int>(offsets[e] - begin);
  const int64_t across = (k + kFp8Block - 1) / kFp8Block, down = (n + kFp8Block - 1) / kFp8Block;
  to.set(e, m, n, k, rows.data + begin * k, rows.scale + begin * across, weight.data + e * n * k,
         weight.scale + e * down * across, out + begin * n, k);
}

// data [width, padded], scale [padded / 128, width] in memory.
__global__ void describe_gradients(WeightGrad::Arrays to, const int32_t* offsets, Operand dy, Operand x, int64_t padded,
                                   float* grad) {
  const int64_t e = threadIdx.x;
  int64_t blocks = 0;  // before the expert's
  int begin = 0, rows = offsets[0];
  for (int64_t i = 0; i < e; ++i) {
    blocks += (rows + kFp8Block - 1) / kFp8Block;
    begin += rows;
    rows = offsets[i + 1] - begin;
  }
  const int whole = static_cast<int>((rows + kFp8Block - 1) / kFp8Block * kFp8Block), n = dy.width, k = x.width;
  to.set(e, n, k, whole, dy.data + blocks * kFp8Block, dy.scale + blocks * n, x.data + blocks * kFp8Block,
         x.scale + blocks * k, grad + e * n * k, padded);
}

}  // namespace

void grouped_fp8_cuda(View rows, View rows_scale, View weight, View weight_scale, View offsets, View out,
                      View workspace) {
  const int64_t experts = offsets.elements;
  const Operand a{rows, rows_scale, static_cast<int>(rows.width)}, b{weight, weight_scale, static_cast<int>(out.width)};
  OfRows::Arrays arrays{};
  char* rest = OfRows::place_arrays(arrays, experts, workspace);
  describe_rows<<<1, static_cast<unsigned>(experts), 0, current_stream()>>>(arrays, offsets, a, b, out);
  MARROW_CUDA_CHECK(cudaGetLastError());
  start_product<OfRows::Product>(OfRows::arguments(arrays, experts), rest, workspace);
}

void grouped_fp8_weight_grad_cuda(View dy, View dy_scale, View x, View x_scale, View offsets, View grad,
                                  View workspace) {
  const int64_t experts = offsets.elements;
  const Operand a{dy, dy_scale, static_cast<int>(dy.rows)}, b{x, x_scale, static_cast<int>(x.rows)};
  WeightGrad::Arrays arrays{};
  char* rest = WeightGrad::place_arrays(arrays, experts, workspace);
  describe_gradients<<<1, static_cast<unsigned>(experts), 0, current_stream()>>>(arrays, offsets, a, b, dy.width, grad);
  MARROW_CUDA_CHECK(cudaGetLastError());
  auto arguments = WeightGrad::arguments(arrays, experts);
  using Raster = decltype(arguments.scheduler.raster_order);
  arguments.scheduler.raster_order = b.width < a.width ? Raster::AlongN : Raster::AlongM;  // along the shorter side
  start_product<WeightGrad::Product>(arguments, rest, workspace);
}

}  // namespace marrow
