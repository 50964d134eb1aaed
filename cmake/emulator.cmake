# test_kernels: the tests of tests/ops with the CUDA kernels on the CPU (tests/emulator/emulator.h). Every src/ops/*.cu
# is emulated but these, whose results ATen computes (tests/emulator/library_products.cpp):
set(NOT_EMULATED
  grouped_linear # CUTLASS
  grouped_fp8
  dense_fp8)     # cuBLASLt
set(EMULATOR "${CMAKE_SOURCE_DIR}/tests/emulator")
set(EMULATED "${CMAKE_BINARY_DIR}/emulated")
find_package(Python3 REQUIRED COMPONENTS Interpreter)

file(GLOB CUDA_FILES CONFIGURE_DEPENDS src/ops/*.cu src/ops/*.cuh)
foreach(name ${NOT_EMULATED})
  if(NOT "${CMAKE_SOURCE_DIR}/src/ops/${name}.cu" IN_LIST CUDA_FILES)
    message(FATAL_ERROR "cmake/emulator.cmake leaves out src/ops/${name}.cu, which does not exist")
  endif()
  list(REMOVE_ITEM CUDA_FILES "${CMAKE_SOURCE_DIR}/src/ops/${name}.cu")
endforeach()
file(MAKE_DIRECTORY "${EMULATED}/ops")
foreach(file ${CUDA_FILES})
  get_filename_component(name ${file} NAME)
  set(target "${EMULATED}/ops/${name}")
  if(name MATCHES "[.]cu$")
    string(APPEND target ".cpp")
  endif()
  add_custom_command(OUTPUT ${target} COMMAND Python3::Interpreter ${EMULATOR}/translate.py ${file} ${target}
    DEPENDS ${file} ${EMULATOR}/translate.py VERBATIM)
  list(APPEND EMULATED_FILES ${target})
endforeach()

add_library(emulated_kernels OBJECT ${EMULATED_FILES})
target_include_directories(emulated_kernels PRIVATE ${EMULATED} ${EMULATOR}/include tests)
target_link_libraries(emulated_kernels PRIVATE marrow_flags)
target_compile_options(emulated_kernels PRIVATE -O2 -ffp-contract=fast -fsanitize=address,undefined
  -fno-sanitize-recover=all -fno-strict-aliasing -Wno-sign-compare -Wno-unused-function)

# The operators as with CUDA, which call them.
file(GLOB EMULATED_OPS CONFIGURE_DEPENDS src/ops/*.cpp)
list(FILTER EMULATED_OPS EXCLUDE REGEX "/(pch|device|attention|attention_kernels|linear|recompute)[.]cpp$")
add_library(emulated_ops OBJECT ${EMULATED_OPS})
target_include_directories(emulated_ops PRIVATE ${EMULATOR}/include)
target_compile_definitions(emulated_ops PRIVATE MARROW_CUDA=1)
target_link_libraries(emulated_ops PRIVATE marrow_pch)
target_precompile_headers(emulated_ops REUSE_FROM marrow_pch)

add_executable(test_kernels ${EMULATOR}/main.cpp ${EMULATOR}/device.cpp ${EMULATOR}/emulator.cpp
  ${EMULATOR}/library_products.cpp $<TARGET_OBJECTS:test_ops>
  $<TARGET_OBJECTS:emulated_kernels> $<TARGET_OBJECTS:emulated_ops>)
target_include_directories(test_kernels PRIVATE tests)
target_precompile_headers(test_kernels REUSE_FROM marrow_pch)
set_source_files_properties(${EMULATOR}/emulator.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
target_link_options(test_kernels PRIVATE -fsanitize=address,undefined)
target_link_libraries(test_kernels PRIVATE marrow_ops GTest::gtest)
add_test(NAME kernels COMMAND test_kernels)
set_tests_properties(kernels PROPERTIES LABELS cpu ENVIRONMENT "OMP_WAIT_POLICY=passive;GOMP_SPINCOUNT=0")
