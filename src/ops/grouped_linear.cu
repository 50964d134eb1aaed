// The products of all experts in one persistent kernel: CUTLASS's grouped products of Hopper. A weight's gradient is
// added into fp32 where it is kept (C = D, beta = 1).
#include "ops/grouped_products.cuh"

namespace marrow {
namespace {

using cute::_1, cute::_2, cute::_64, cute::_128, cute::_256;

// Two groups of warps have a tile each and take turns: one multiplies while the other writes its finished tile.
struct Pingpong {
  using Tile = cute::Shape<_128, _128, _64>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

// Both groups share a tile: fewer bytes read, where they and not the products are the limit.
struct Cooperative {
  using Tile = cute::Shape<_128, _256, _64>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

// D = A · B, or D += A · B in fp32. A and B are bf16.
template <class LayoutA, class LayoutB, class D, class Schedule, class Cluster>
struct Grouped {
  static constexpr bool kAdds = std::is_same_v<D, float>;
  static constexpr int kAlignment = 16 / sizeof(D);
  using Element = cutlass::bfloat16_t;
  using Out = D;
  using Tile = typename Schedule::Tile;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, std::conditional_t<kAdds, D, void>, RowMajor,
      kAlignment, D, RowMajor, kAlignment, typename Schedule::Epilogue,
      cutlass::epilogue::fusion::LinearCombination<D, float, D, float>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, 8, Element, LayoutB, 8, float, Tile,
      Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      typename Schedule::Mainloop>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<GroupedShape>, Mainloop, Epilogue>;
  using Product = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  // What the kernel reads of the experts, arrays [E] on the device.
  struct Arrays {
    GroupedShape* shape;
    const Element** a;
    const Element** b;
    D** d;
    typename Kernel::InternalStrideA* a_stride;
    typename Kernel::InternalStrideB* b_stride;
    typename Kernel::InternalStrideD* d_stride;
  };
};

// Measured on an H200 with 256 and 1,024 rows an expert, even and as uneven as routers choose: docs/benchmarks.md.
using Forward = Grouped<RowMajor, ColumnMajor, cutlass::bfloat16_t, Pingpong, cute::Shape<_1, _2, _1>>;
using InputGrad = Grouped<RowMajor, RowMajor, cutlass::bfloat16_t, Pingpong, cute::Shape<_1, _2, _1>>;
using WeightGrad = Grouped<ColumnMajor, RowMajor, float, Pingpong, cute::Shape<_2, _1, _1>>;
using LargeTilesWeightGrad = Grouped<ColumnMajor, RowMajor, float, Cooperative, cute::Shape<_2, _1, _1>>;
constexpr int64_t kFewRows = 512;                 // of an expert, on average
constexpr int64_t kLargeGrad = int64_t{1} << 23;  // elements of an expert's

// A matrix of each expert: rows of a tensor [R, width], or one of [E, ...] matrices.
struct Operand {
  void* data;
  int64_t per_row, per_expert;  // elements from one row's, or one expert's, to the next
  int64_t stride;               // of the matrix
};

template <class Stride>
__device__ void set_stride(Stride& stride, int64_t value) {
  if constexpr (cute::is_static<std::decay_t<decltype(cute::get<0>(stride))>>::value) {
    cute::get<1>(stride) = value;
  } else {
    cute::get<0>(stride) = value;
  }
}

// One block, one thread an expert. m or k may be 0: the expert's rows. One without rows has no tile, so that its
// gradient stays as it is.
template <class G>
__global__ void describe_experts(typename G::Arrays out, const int32_t* offsets, Operand a, Operand b, Operand d, int m,
                                 int n, int k) {
  const int64_t e = threadIdx.x, begin = e == 0 ? 0 : offsets[e - 1];
  const int rows = static_cast<int>(offsets[e] - begin);
  out.shape[e] = {rows == 0 || m == 0 ? rows : m, n, k == 0 ? rows : k};
  out.a[e] = static_cast<const typename G::Element*>(a.data) + begin * a.per_row + e * a.per_expert;
  out.b[e] = static_cast<const typename G::Element*>(b.data) + begin * b.per_row + e * b.per_expert;
  out.d[e] = static_cast<typename G::Out*>(d.data) + begin * d.per_row + e * d.per_expert;
  set_stride(out.a_stride[e], a.stride);
  set_stride(out.b_stride[e], b.stride);
  set_stride(out.d_stride[e], d.stride);
}

template <class G>
typename G::Product::Arguments arguments_of(const typename G::Arrays& arrays, int64_t experts) {
  typename G::Product::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGrouped,
                                           {static_cast<int>(experts), arrays.shape, nullptr},
                                           {arrays.a, arrays.a_stride, arrays.b, arrays.b_stride},
                                           {{}, nullptr, nullptr, arrays.d, arrays.d_stride},
                                           this_gpu()};
  arguments.epilogue.thread.alpha = 1;
  arguments.epilogue.thread.beta = G::kAdds ? 1 : 0;
  if constexpr (G::kAdds) {
    arguments.epilogue.ptr_C = const_cast<const float**>(arrays.d);
    arguments.epilogue.dC = arrays.d_stride;
  }
  return arguments;
}

template <class G>
void multiply(const Operand& a, const Operand& b, const Operand& d, int64_t m, int64_t n, int64_t k, View offsets,
              View workspace) {
  const int64_t experts = offsets.elements;
  typename G::Arrays arrays{};
  char* rest = place(static_cast<char*>(workspace), experts, arrays.shape, arrays.a, arrays.b, arrays.d,
                     arrays.a_stride, arrays.b_stride, arrays.d_stride);
  describe_experts<G><<<1, static_cast<unsigned>(experts), 0, current_stream()>>>(
      arrays, offsets, a, b, d, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k));
  MARROW_CUDA_CHECK(cudaGetLastError());
  auto arguments = arguments_of<G>(arrays, experts);
  using Raster = decltype(arguments.scheduler.raster_order);
  // Along the shorter side, but of large matrices along n.
  if (G::kAdds) arguments.scheduler.raster_order = n < m || n * m >= kLargeGrad ? Raster::AlongN : Raster::AlongM;
  start_product<typename G::Product>(arguments, rest, workspace);
}

}  // namespace

void grouped_forward_cuda(View rows, View weight, View offsets, View out, View workspace) {
  const int64_t n = out.width, k = rows.width;
  multiply<Forward>({rows, k, 0, k}, {weight, 0, n * k, k}, {out, n, 0, n}, 0, n, k, offsets, workspace);
}

void grouped_input_grad_cuda(View dy, View weight, View offsets, View d_rows, View workspace) {
  const int64_t n = dy.width, k = d_rows.width;
  multiply<InputGrad>({dy, n, 0, n}, {weight, 0, n * k, k}, {d_rows, k, 0, k}, 0, k, n, offsets, workspace);
}

void grouped_weight_grad_cuda(View dy, View rows, View offsets, View grad, View workspace) {
  const int64_t n = dy.width, k = rows.width;
  const bool large = rows.rows < kFewRows * offsets.elements || n * k >= kLargeGrad;
  const auto run = large ? multiply<LargeTilesWeightGrad> : multiply<WeightGrad>;
  run({dy, n, 0, n}, {rows, k, 0, k}, {grad, 0, n * k, k}, n, k, 0, offsets, workspace);
}

}  // namespace marrow
