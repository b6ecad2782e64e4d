#include "parallel.h"

#include "api.h"
#include "team.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#ifndef FUSEDOPS_HEADER  // the build of the package gives it: structs.py
#define FUSEDOPS_HEADER 0
#endif

namespace fusedops {
ParallelFor parallel_for = nullptr;
GetNumThreads get_num_threads = nullptr;

void use_huge_pages(void* result, int64_t elements, int64_t dtype) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 2 << 20;
  const int64_t bytes = elements * (dtype == FLOAT32 ? 4 : 2);
  if (!result || bytes < 8 << 20) return;
  const uintptr_t begin = (uintptr_t(result) + PAGE - 1) / PAGE * PAGE, end = (uintptr_t(result) + bytes) / PAGE * PAGE;
  madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#else
  (void)result, (void)elements, (void)dtype;
#endif
}

Blocks::Blocks(int64_t blocks, int64_t workers, const void* f)
    : f(f), blocks_(blocks), stretches_(workers < MOST ? workers : MOST) {
  for (int64_t i = 0; i < stretches_; i++) next_[i].store(blocks * i / stretches_, std::memory_order_relaxed);
}

void Blocks::run(int64_t workers, ParallelBody body) {
  if (workers > 1 && has_team()) {
    run_in_team(workers, body, this);
  } else if (workers > 1) {
    parallel_for(0, workers, 1, body, this);
  } else {
    body(0, 1, this);
  }
}

int64_t Blocks::take(int64_t worker, int64_t& tried) {
  for (; tried < stretches_; tried++) {
    const int64_t stretch = (worker + tried) % stretches_, end = blocks_ * (stretch + 1) / stretches_;
    const int64_t block = next_[stretch].fetch_add(1, std::memory_order_relaxed);
    if (block < end) return block;
  }
  return -1;
}
}  // namespace fusedops

FUSEDOPS_EXPORT void fusedops_use_threads(void* parallel_for, void* get_num_threads) {
  fusedops::parallel_for = (fusedops::ParallelFor)parallel_for;
  fusedops::get_num_threads = (fusedops::GetNumThreads)get_num_threads;
}

FUSEDOPS_EXPORT int64_t fusedops_header() { return FUSEDOPS_HEADER; }
