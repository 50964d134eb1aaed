# Fuzzers of the parsers: tests/fuzz/NAME_fuzz.cpp is fuzz_NAME, by libFuzzer and with sanitizers. Of src/ they have the
# readers and no more, so that clang compiles few files.
set(CMAKE_CXX_FLAGS_RELEASE "-O1")
add_compile_options(-Wall -Wextra -Wno-unknown-pragmas -g1 -march=x86-64-v3 -fno-omit-frame-pointer
  -fsanitize=fuzzer-no-link,address,undefined,float-cast-overflow -fno-sanitize=vptr,function
  -fno-sanitize-recover=all)
include_directories(src tests)

# libbacktrace's header is one of g++'s, whose others clang must not see.
find_program(GXX g++ REQUIRED)
foreach(header backtrace.h backtrace-supported.h)
  execute_process(COMMAND ${GXX} -print-file-name=include/${header}
    OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(EXISTS "${path}")
    configure_file("${path}" "${CMAKE_BINARY_DIR}/include/${header}" COPYONLY)
  endif()
endforeach()
add_library(fuzz_data STATIC src/base/error.cpp src/base/files.cpp src/base/json.cpp src/data/document_source.cpp
  src/data/indexed_corpus.cpp src/data/tokenizer.cpp src/data/tokenizer_json.cpp src/data/unicode_text.cpp)
target_include_directories(fuzz_data SYSTEM PUBLIC "${TORCH_ROOT}/include" "${CMAKE_BINARY_DIR}/include")
target_compile_definitions(fuzz_data PUBLIC FMT_HEADER_ONLY=1)
target_link_libraries(fuzz_data PUBLIC pcre2-8 utf8proc crypto zstd z)

file(GLOB MODEL_SOURCES CONFIGURE_DEPENDS src/models/*.cpp)
add_library(fuzz_models STATIC ${MODEL_SOURCES} src/ops/qk_norm_rope.cpp src/train/config_checks.cpp
  src/train/pretrain_config.cpp src/train/trainer_state.cpp)
# toml++ calls unreachable what it does reach at U+00A1 and others; what its function returns there is right.
set_source_files_properties(src/train/pretrain_config.cpp PROPERTIES COMPILE_OPTIONS -fno-sanitize=unreachable)
target_precompile_headers(fuzz_models PRIVATE src/ops/pch.h)
target_compile_options(fuzz_models PRIVATE -fpch-instantiate-templates)
target_link_libraries(fuzz_models PUBLIC fuzz_data libtorch)

file(GLOB FUZZERS CONFIGURE_DEPENDS tests/fuzz/*_fuzz.cpp)
foreach(source ${FUZZERS})
  string(REGEX REPLACE ".*/(.*)_fuzz[.]cpp$" "fuzz_\\1" name "${source}")
  add_executable(${name} ${source})
  target_link_options(${name} PRIVATE -fuse-ld=lld -fsanitize=fuzzer,address,undefined)
  file(STRINGS "${source}" torch REGEX "\"(models|train)/")
  if(torch)
    target_precompile_headers(${name} REUSE_FROM fuzz_models)
    target_compile_options(${name} PRIVATE -fpch-instantiate-templates)
    # Models call operators and communicators, which no parser does: their places are found when they are called.
    target_link_options(${name} PRIVATE LINKER:--unresolved-symbols=ignore-all LINKER:-z,lazy)
    target_link_libraries(${name} PRIVATE fuzz_models)
  else()
    target_link_libraries(${name} PRIVATE fuzz_data)
  endif()
endforeach()
