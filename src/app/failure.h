// Any exception as an Error with a fix.
#pragma once
#include "base/error.h"

namespace marrow {

// In a catch block: the exception being handled. Of what a library threw its text is all that is known.
Error current_error();

}  // namespace marrow
