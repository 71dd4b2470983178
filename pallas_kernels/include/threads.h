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

#include "xla/ffi/api/ffi.h"

// Calls body(item, after) for every item below `count`, on this thread and on at most
// `threads` - 1 threads of the pool. With kClaimsAhead, `after` is the item that the same thread
// takes next, or -1 after its last; without it, -1. Returns when all items are done. `body` is
// kept alive as long as any thread uses it.
template <bool kClaimsAhead = false, typename Body>
void for_each_item(xla::ffi::ThreadPool& pool, int64_t count, int64_t threads, Body body) {
  // A helper that starts late finds no item left, possibly after the caller has returned.
  struct Shared {
    Body body;
    int64_t count;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;

    Shared(Body body, int64_t count) : body(std::move(body)), count(count) {}

    void take_items() {
      int64_t item = next.fetch_add(1);
      while (item < count) {
        const int64_t claimed = kClaimsAhead ? next.fetch_add(1) : -1;
        body(item, claimed < count ? claimed : -1);
        if (done.fetch_add(1) + 1 == count) {
          std::lock_guard<std::mutex> lock(mutex);
          all_done.notify_one();
        }
        item = kClaimsAhead ? claimed : next.fetch_add(1);
      }
    }
  };
  auto shared = std::make_shared<Shared>(std::move(body), count);
  const int64_t helpers = std::min({pool.num_threads(), count, threads}) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->take_items(); });
  shared->take_items();
  // This waits only for items that another thread has begun, so a busy pool cannot block it.
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done.load() == count; });
}

#endif  // PALLAS_KERNELS_THREADS_H_
