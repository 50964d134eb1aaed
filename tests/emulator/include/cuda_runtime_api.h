// What the C++ side of the operators knows of CUDA.
#pragma once
using cudaStream_t = void*;
