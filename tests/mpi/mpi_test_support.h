// For tests that run as several ranks of one mpirun.
#pragma once
#include "parallel/mesh_communicators.h"
#include "parallel/transfer_record.h"

namespace marrow {

Bootstrap& test_bootstrap();  // of this process; main.cpp
RunRecords& test_records();

}  // namespace marrow
