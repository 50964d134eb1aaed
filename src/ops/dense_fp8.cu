// A linear map's weight gradient in fp8, added in place: cuBLASLt's product with a scale for each row's 128 elements on
// both sides (libtorch has it without the sum, whose fp32 result would be written, read and added).
#include <cublasLt.h>

#include <memory>

#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) throw_cuda_error(call, cublasLtGetStatusString(status), __FILE__, __LINE__);
}

template <auto destroy>
struct Destroy {
  template <typename T>
  void operator()(T* object) const {
    destroy(object);
  }
};
using Description = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayoutDestroy>>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy<cublasLtMatmulPreferenceDestroy>>;

template <typename T>
void set(const Description& description, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(description.get(), attribute, &value, sizeof value), "cublasLtMatmulDesc");
}

Description describe(const float* a_scale, const float* b_scale) {
  cublasLtMatmulDesc_t made = nullptr;
  check(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  Description description(made);
  set(description, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(description, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
  set(description, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
  set(description, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a_scale);
  set(description, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, b_scale);
  return description;
}

// As cuBLAS has it: columns one after another.
Layout layout(cudaDataType_t type, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(&made, type, rows, columns, rows), "cublasLtMatrixLayoutCreate");
  return Layout(made);
}

Preference prefer(int64_t workspace, const void* sum) {
  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
  Preference preference(made);
  const auto bytes = static_cast<uint64_t>(workspace);
  const uint32_t alignment = aligned_to(sum, 256) ? 256 : 16;
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof value), "cublasLtMatmulPreference");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment);
  return preference;
}

}  // namespace

void fp8_weight_grad_cuda(void* handle, View dy, View dy_scale, View x, View x_scale, View grad, View workspace) {
  const int64_t n = dy.rows, k = x.rows, rows = x.width;
  const auto lt = static_cast<cublasLtHandle_t>(handle);
  // In cuBLAS's order grad is [K, N] = xᵀ · dy.
  const Description product = describe(x_scale, dy_scale);
  const Layout a = layout(CUDA_R_8F_E4M3, rows, k), b = layout(CUDA_R_8F_E4M3, rows, n), d = layout(CUDA_R_32F, k, n);
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  check(cublasLtMatmulAlgoGetHeuristic(lt, product.get(), a.get(), b.get(), d.get(), d.get(),
                                       prefer(workspace.elements, grad.data).get(), 1, &best, &found),
        "cublasLtMatmulAlgoGetHeuristic");
  const float one = 1;
  check(cublasLtMatmul(lt, product.get(), &one, x.data, a.get(), dy.data, b.get(), &one, grad.data, d.get(), grad.data,
                       d.get(), &best.algo, workspace.data, static_cast<size_t>(workspace.elements), current_stream()),
        "cublasLtMatmul");
}

}  // namespace marrow
