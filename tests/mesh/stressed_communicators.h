// Communicators whose operations start late at random: the program is linked with --wrap for make_mesh_communicators.
#pragma once

namespace marrow::test {

// Runs from here on have them, or not. On a GPU the operation alone is late, by a kernel before it on a stream of its
// own, and what follows on the compute stream is not; on a CPU the rank sleeps. At its end each communicator checks
// that all its ranks started the same collective operations in the same order.
void set_random_delays(bool on);

}  // namespace marrow::test
