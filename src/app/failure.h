// Any exception as an Error with a fix.
#pragma once
#include "base/error.h"

namespace marrow {

// Called in a catch block: the exception being handled. What a library threw: its text is all that is
// known of the place.
Error current_error();

}  // namespace marrow
