#include "parallel.h"

#include "api.h"

namespace fusedops {
ParallelFor parallel_for = nullptr;
GetNumThreads get_num_threads = nullptr;
}  // namespace fusedops

FUSEDOPS_EXPORT void fusedops_use_threads(void* parallel_for, void* get_num_threads) {
  fusedops::parallel_for = (fusedops::ParallelFor)parallel_for;
  fusedops::get_num_threads = (fusedops::GetNumThreads)get_num_threads;
}
