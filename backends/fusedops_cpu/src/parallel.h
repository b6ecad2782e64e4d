// Threads of torch, and memory that is checked: a kernel returns OUT_OF_MEMORY instead of using a null pointer.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "simd/vector.h"

namespace fusedops {

enum Status : int {
  OK = 0,
  OUT_OF_MEMORY = 1,
  INVALID = 2,
  TARGET_OUTSIDE = 3,
  NO_SUCH_PAGE = 4,
  NO_SUCH_SLOT = 5,
  NO_SUCH_KEY = 6
};

// torch_parallel_for and torch_get_num_threads of libtorch_cpu (torch >= 2.10); null: one thread.
typedef void (*ParallelBody)(int64_t begin, int64_t end, void* context);
typedef int (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);
typedef int (*GetNumThreads)(uint32_t* count);
extern ParallelFor parallel_for;
extern GetNumThreads get_num_threads;

// Asks the kernel of Linux for pages of 2 MiB for a result, or a buffer, of 8 MiB or more, which glibc may map anew
// each time: the first write of each page of 4 KiB takes longer than the op (layer_norm of 128 MiB: half the time). As
// NumPy does; where transparent huge pages are off, and for memory that was written before, nothing changes.
void use_huge_pages(void* result, int64_t elements, int64_t dtype);

// True in a step of run_calls() whose own threads wait for work, awake: a call may be shared with them for less of it.
bool has_team();

// The blocks of one call, cut into one stretch for each worker: neighbouring pages that two threads write for the first
// time at once make them wait for one lock of the kernel (softmax forward of 4 MiB: 1.1 to 1.3 times as fast). A worker
// at the end of its stretch goes on with those of others, so that a core that is busy with other programs delays
// nothing but its own block.
class Blocks {
 public:
  Blocks(int64_t blocks, int64_t workers, const void* f);
  void run(int64_t workers, ParallelBody body);
  int64_t take(int64_t worker, int64_t& tried);  // the next block of a worker, -1 at the end; `tried` starts at 0
  const void* f;

 private:
  static constexpr int64_t MOST = 64;
  int64_t blocks_, stretches_;
  std::atomic<int64_t> next_[MOST];
};

namespace {

constexpr int64_t BLOCK = 32768;  // elements of a block: 10 to 30 us of work, a few times what waking a thread costs

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

inline int64_t workers_for(int64_t blocks) {
  uint32_t threads = 1;
  if (blocks > 1 && parallel_for && get_num_threads) get_num_threads(&threads);
  return blocks < int64_t(threads) ? (blocks > 1 ? blocks : 1) : int64_t(threads);
}

// Calls f(block, worker) for each block; worker is in [0, workers).
template <class F>
void run_blocks(int64_t blocks, int64_t workers, F f) {
  Blocks all(blocks, workers, &f);
  all.run(workers, [](int64_t worker, int64_t, void* context) {
    Blocks& blocks = *(Blocks*)context;
    F copy = *(const F*)blocks.f;  // a local copy: no store of the loop can change what it holds: it stays in registers
    int64_t tried = 0;
    for (int64_t block; (block = blocks.take(worker, tried)) >= 0;) copy(block, worker);
  });
}

template <class F>
void run_blocks(int64_t blocks, F f) {
  run_blocks(blocks, workers_for(blocks), [f](int64_t block, int64_t) { f(block); });
}

// Memory that begins with a cache line: of vectors elsewhere, every second one would be in two lines.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : memory_(count > 0 ? malloc(count * sizeof(T) + LINE) : nullptr) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(memory_); }
  T* data() const { return memory_ ? (T*)((uintptr_t(memory_) + LINE) / LINE * LINE) : nullptr; }

 private:
  static constexpr uintptr_t LINE = 64;
  void* memory_;
};
using FloatBuffer = Buffer<float>;

// One buffer for each worker, of which a part may be of int64 or of pointers.
class Scratch {
 public:
  Scratch(int64_t workers, int64_t floats) : floats_(round_up(floats, 16)), buffer_(workers * floats_) {}
  bool failed() const { return !buffer_.data(); }
  float* of(int64_t worker) const { return buffer_.data() + worker * floats_; }

 private:
  int64_t floats_;
  FloatBuffer buffer_;
};

}  // namespace
}  // namespace fusedops
