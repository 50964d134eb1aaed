// Every subcommand of the binary; main.cpp holds the table. One file of src/app each.
#pragma once
#include "app/command_line.h"

namespace marrow {

Subcommand tokenize_command();  // tokenize.cpp
Subcommand pretrain_command();  // pretrain.cpp
Subcommand export_command();    // export.cpp
Subcommand import_command();    // import.cpp
Subcommand generate_command();  // generate.cpp
Subcommand eval_command();      // eval.cpp
Subcommand inspect_command();   // inspect.cpp
Subcommand doctor_command();    // doctor.cpp
Subcommand estimate_command();  // estimate.cpp
Subcommand plan_command();      // plan.cpp
Subcommand report_command();    // report.cpp

}  // namespace marrow
