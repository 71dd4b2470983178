// Runs work items on XLA's own threads.

#ifndef PALLAS_KERNELS_THREADS_H_
#define PALLAS_KERNELS_THREADS_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "ffi.h"

// About 50 us: as long as an item takes, and less than it costs to fall asleep and be woken often.
constexpr int kSpins = 1500;

inline void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// The next item that no thread has taken yet; at or past the number of items if there is none.
using NextItem = std::atomic<int64_t>;

// Calls body(item, next) for every item below `count`, on this thread and on at most `threads` - 1
// threads of the pool. Returns when all items are done. `body` is kept alive as long as any thread
// uses it.
template <typename Body>
void for_each_item(ffi::ThreadPool& pool, int64_t count, int64_t threads, Body body) {
  // A helper that starts late finds no item left, possibly after the caller has returned.
  struct Shared {
    Body body;
    int64_t count;
    NextItem next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;

    Shared(Body body, int64_t count) : body(std::move(body)), count(count) {}

    void take_items() {
      for (int64_t item = next.fetch_add(1); item < count; item = next.fetch_add(1)) {
        body(item, next);
        if (done.fetch_add(1) + 1 == count) {
          std::lock_guard<std::mutex> lock(mutex);
          all_done.notify_one();
        }
      }
    }
  };
  const int64_t helpers = std::min({pool.num_threads(), count, threads}) - 1;
  if (helpers <= 0) {
    NextItem next{0};
    for (int64_t item = 0; item < count; ++item) next = item + 1, body(item, next);
    return;
  }
  auto shared = std::make_shared<Shared>(std::move(body), count);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->take_items(); });
  shared->take_items();
  // This waits only for items that another thread has begun, so a busy pool cannot block it.
  for (int i = 0; i < kSpins; ++i) {
    if (shared->done.load(std::memory_order_acquire) == count) return;
    pause_thread();
  }
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done.load() == count; });
}

#endif  // PALLAS_KERNELS_THREADS_H_
