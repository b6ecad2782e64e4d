#include "team.h"

#include "api.h"

#ifndef _WIN32
#include <pthread.h>
#include <sched.h>
#endif

namespace fusedops {
namespace {

thread_local bool in_step = false;

// A job is open while its word has seats. A worker takes one, which is also its number, and is counted while it runs;
// the thread of the step closes the job by taking all seats, and waits for those that are counted.
constexpr uint64_t SEAT = uint64_t(1) << 16, SEATS = 0xffffull << 16, RUNNING = 0xffff, JOB = uint64_t(1) << 32;
constexpr int64_t MOST = 64;  // threads, as Blocks have stretches

struct Team {
  std::atomic<uint64_t> word{0};
  std::atomic<bool> taken{false};
  std::atomic<int64_t> awake{0};  // how many of its threads a step has
  ParallelBody body;
  void* context;
  int64_t threads;  // that were started
};
Team team;

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

#ifndef _WIN32
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

// Runs a part of the open job. False where there is none.
bool work() {
  uint64_t word = team.word.load(std::memory_order_acquire);
  while (word & SEATS) {
    if (!team.word.compare_exchange_weak(word, word - SEAT + 1, std::memory_order_acq_rel)) continue;
    const int64_t worker = int64_t((word & SEATS) / SEAT);
    team.body(worker, worker + 1, team.context);
    team.word.fetch_sub(1, std::memory_order_release);
    return true;
  }
  return false;
}

constexpr int TURNS = 64;  // some 2 us: longer than what is between two calls

void* serve(void* number) {
  const auto is_awake = [number] { return team.awake.load(std::memory_order_acquire) > (int64_t)number; };
  for (;;) {
    pthread_mutex_lock(&mutex);
    while (!is_awake()) pthread_cond_wait(&wake, &mutex);
    pthread_mutex_unlock(&mutex);
    while (is_awake()) {
      bool found = work();
      for (int i = 0; i < TURNS && !found; i++) {
        relax();
        found = work();
      }
      if (!found) sched_yield();  // on a busy machine the thread of the step may wait for this core
    }
  }
  return nullptr;
}

// A forked child has none of the threads.
void forget() {
  team.word.store(0);
  team.taken.store(false);
  team.awake.store(0);
  team.threads = 0;
  in_step = false;
  mutex = PTHREAD_MUTEX_INITIALIZER;
  wake = PTHREAD_COND_INITIALIZER;
}

bool start(int64_t threads) {
  static bool is_told = false;  // the thread that has the team is the only one here
  if (!is_told) is_told = !pthread_atfork(nullptr, nullptr, forget);
  for (; is_told && team.threads < threads; team.threads++) {
    pthread_t thread;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    const bool failed = pthread_create(&thread, &detached, serve, (void*)team.threads);
    pthread_attr_destroy(&detached);
    if (failed) break;
  }
  return team.threads > 0;
}
#endif

}  // namespace

bool has_team() { return in_step; }

bool begin_team() {
#ifndef _WIN32  // without pthreads the calls of a step run on torch's threads
  uint32_t threads = 1;
  if (in_step || !get_num_threads) return false;
  get_num_threads(&threads);
  if (threads < 2 || team.taken.exchange(true, std::memory_order_acquire)) return false;
  const int64_t others = (threads < MOST ? threads : MOST) - 1;
  if (!start(others)) {
    team.taken.store(false, std::memory_order_release);
    return false;
  }
  in_step = true;
  pthread_mutex_lock(&mutex);
  team.awake.store(others, std::memory_order_release);
  pthread_cond_broadcast(&wake);
  pthread_mutex_unlock(&mutex);
#endif
  return in_step;
}

void end_team() {
  team.awake.store(0, std::memory_order_release);
  in_step = false;
  team.taken.store(false, std::memory_order_release);
}

void run_in_team(int64_t workers, ParallelBody body, void* context) {
  team.body = body;
  team.context = context;
  uint64_t word = team.word.load(std::memory_order_relaxed);
  const uint64_t seats = uint64_t(workers < MOST ? workers - 1 : MOST - 1) * SEAT;
  team.word.store((word & ~(SEATS | RUNNING)) + JOB + seats, std::memory_order_release);
  body(0, 1, context);
  team.word.fetch_and(~SEATS, std::memory_order_acq_rel);
  while (team.word.load(std::memory_order_acquire) & RUNNING) relax();
}

}  // namespace fusedops

// A call of a recorded step: a function of the library, and the struct whose address it takes.
struct FusedopsRecorded {
  int32_t (*function)(const void*);
  const void* fields;
};

// Begins a step of recorded calls; returns whether fusedops_end_step has to be called.
FUSEDOPS_EXPORT int32_t fusedops_begin_step() {
  return fusedops::begin_team();
}
FUSEDOPS_EXPORT void fusedops_end_step() { fusedops::end_team(); }

// Makes calls one after another. Returns 0, or the status of the first that fails.
FUSEDOPS_EXPORT int32_t fusedops_run_calls(const void* calls, int64_t count) {
  const auto* each = (const FusedopsRecorded*)calls;
  for (int64_t i = 0; i < count; i++) {
    if (const int32_t status = each[i].function(each[i].fields)) return status;
  }
  return 0;
}
