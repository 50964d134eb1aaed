# libtorch out of the PyPI wheel in .venv: include folders and shared libraries, nothing else.
# find_package(Torch) is not used: it rewrites the CUDA architectures and links libtorch_python.
file(GLOB MARROW_SITE "${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages")
if(NOT EXISTS "${MARROW_SITE}/torch/lib/libtorch_cpu.so")
  message(FATAL_ERROR "libtorch is not in .venv; run ./dev setup")
endif()
set(TORCH_ROOT "${MARROW_SITE}/torch")

add_library(libtorch INTERFACE)
target_include_directories(libtorch SYSTEM INTERFACE "${TORCH_ROOT}/include")
target_compile_definitions(libtorch INTERFACE FMT_HEADER_ONLY=1 AT_PARALLEL_OPENMP=1)
# torch's own libgomp: a second OpenMP runtime in one process oversubscribes the cores.
target_link_libraries(libtorch INTERFACE
  "${TORCH_ROOT}/lib/libtorch_cpu.so" "${TORCH_ROOT}/lib/libc10.so" "${TORCH_ROOT}/lib/libgomp.so.1")
target_link_options(libtorch INTERFACE "-Wl,-rpath,${TORCH_ROOT}/lib")

if(MARROW_CUDA)
  set(CUDA_WHEEL "${MARROW_SITE}/nvidia/cu13")
  # --no-as-needed: libtorch_cuda registers its kernels when it loads; no symbol pulls it in.
  target_link_libraries(libtorch INTERFACE
    "-Wl,--no-as-needed" "${TORCH_ROOT}/lib/libtorch_cuda.so" "${TORCH_ROOT}/lib/libc10_cuda.so"
    "-Wl,--as-needed" "${MARROW_SITE}/nvidia/nccl/lib/libnccl.so.2")
  target_include_directories(libtorch SYSTEM INTERFACE "${MARROW_SITE}/nvidia/nccl/include")
  file(GLOB NVIDIA_LIBS LIST_DIRECTORIES true "${MARROW_SITE}/nvidia/*/lib")
  foreach(dir ${NVIDIA_LIBS})
    target_link_options(libtorch INTERFACE "-Wl,-rpath,${dir}" "-Wl,-rpath-link,${dir}")
  endforeach()
endif()
