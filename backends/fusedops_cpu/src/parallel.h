// Threads of torch, and memory that is checked: a kernel returns OUT_OF_MEMORY instead of using a null pointer.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "vector.h"

namespace fusedops {

enum Status : int { OK = 0, OUT_OF_MEMORY = 1, INVALID = 2 };

// torch_parallel_for and torch_get_num_threads of libtorch_cpu (torch >= 2.10); null: one thread.
typedef void (*ParallelBody)(int64_t begin, int64_t end, void* context);
typedef int (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);
typedef int (*GetNumThreads)(uint32_t* count);
extern ParallelFor parallel_for;
extern GetNumThreads get_num_threads;

namespace {

constexpr int64_t BLOCK = 32768;  // elements of a block: 10 to 30 us of work, a few times what waking a thread costs

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t workers_for(int64_t blocks) {
  uint32_t threads = 1;
  if (blocks > 1 && parallel_for && get_num_threads) get_num_threads(&threads);
  return blocks < int64_t(threads) ? (blocks > 1 ? blocks : 1) : int64_t(threads);
}

inline int run_here(int64_t, int64_t, int64_t, ParallelBody body, void* context) { return body(0, 1, context), 0; }

// Calls f(block, worker) for each block; worker is in [0, workers). A worker takes the next block when it is done with
// one, so that a core that is busy with other programs delays nothing but its own block.
template <class F>
void run_blocks(int64_t blocks, int64_t workers, F f) {
  struct Work {
    std::atomic<int64_t> next;
    int64_t blocks;
    const F* f;
  } work{{0}, blocks, &f};
  ParallelBody body = [](int64_t begin, int64_t, void* context) {
    Work& w = *(Work*)context;
    F copy = *w.f;  // a local copy: no store of the loop can change what it holds, so that it stays in registers
    for (int64_t i; (i = w.next.fetch_add(1, std::memory_order_relaxed)) < w.blocks;) copy(i, begin);
  };
  // through a pointer: a call of the body itself would be inlined, a second copy of each kernel in the library
  const ParallelFor run = workers > 1 ? parallel_for : run_here;
  run(0, workers, 1, body, &work);
}

template <class F>
void run_blocks(int64_t blocks, F f) {
  run_blocks(blocks, workers_for(blocks), [f](int64_t block, int64_t) { f(block); });
}

class FloatBuffer {
 public:
  explicit FloatBuffer(int64_t count) : data_(count > 0 ? (float*)malloc(count * sizeof(float)) : nullptr) {}
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;
  ~FloatBuffer() { free(data_); }
  float* data() const { return data_; }

 private:
  float* data_;
};

}  // namespace
}  // namespace fusedops
