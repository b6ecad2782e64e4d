// Threads that stay awake for the calls of a recorded step, between which torch's fall asleep.
#pragma once

#include "parallel.h"

namespace fusedops {

// Begins a step of this thread; false where another thread has one, or where there is but one thread.
bool begin_team();
void end_team();

// Calls body(worker, worker + 1, context) for worker 0 here, and for each of the others that comes before that ends:
// the blocks of a call are taken by whoever is there.
void run_in_team(int64_t workers, ParallelBody body, void* context);

}  // namespace fusedops
