// Threads that stay together for the many short phases of one call.

#ifndef PALLAS_KERNELS_TEAM_H_
#define PALLAS_KERNELS_TEAM_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "ffi.h"
#include "threads.h"

// Runs phases of items on this thread and on threads of XLA's pool, which are woken once, and then
// spin between phases. A thread that does not come, or comes late, is not waited for.
//
// `Work` is what the items of a phase share: work.run(item) does one of them. It is changed between
// phases only.
template <typename Work>
class Team {
 public:
  // `threads` counts the calling thread.
  Team(ffi::ThreadPool& pool, int64_t threads, Work work)
      : shared_(std::make_shared<Shared>(std::move(work))),
        helpers_(std::max<int64_t>(0, std::min(pool.num_threads(), threads) - 1)) {
    for (int64_t i = 0; i < helpers_; ++i)
      pool.Schedule([shared = shared_] { shared->help(); });
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() { shared_->ticket.store(kOver, std::memory_order_release); }

  Work& work() { return shared_->work; }
  bool is_alone() const { return helpers_ == 0; }

  // Does the items below `count`, and returns when all are done.
  void run(int64_t count) {
    Shared& shared = *shared_;
    if (is_alone() || count < 2 || count > kMask) {
      for (int64_t item = 0; item < count; ++item) shared.work.run(item);
      return;
    }
    shared.done.store(0, std::memory_order_relaxed);
    phase_ = (phase_ + 1) & kMask;
    shared.ticket.store(static_cast<uint64_t>(phase_) << (2 * kBits) |
                            static_cast<uint64_t>(count) << kBits,
                        std::memory_order_release);
    while (shared.take_item(shared.ticket.load(std::memory_order_acquire))) {
    }
    for (int i = 0; shared.done.load(std::memory_order_acquire) < count; ++i) {
      // The other thread may need this core to end its item.
      if (i < kSpins) pause_thread();
      else std::this_thread::yield();
    }
  }

 private:
  static constexpr int kBits = 20;
  static constexpr int64_t kMask = (1 << kBits) - 1;
  static constexpr uint64_t kOver = ~uint64_t{0};

  struct Shared {
    Work work;
    // The number of the phase, its items, and the next item that no thread has taken.
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> done{0};

    explicit Shared(Work work) : work(std::move(work)) {}

    // Does the next item, or finds that another thread has taken it; false if none is left.
    bool take_item(uint64_t seen) {
      const int64_t item = seen & kMask, count = seen >> kBits & kMask;
      if (item >= count) return false;
      if (ticket.compare_exchange_strong(seen, seen + 1, std::memory_order_acq_rel)) {
        work.run(item);
        done.fetch_add(1, std::memory_order_release);
      }
      return true;
    }

    void help() {
      for (;;) {
        const uint64_t seen = ticket.load(std::memory_order_acquire);
        if (seen == kOver) return;
        if (!take_item(seen)) pause_thread();
        // A thread with other work may need this core. Better now than in the midst of an item,
        // for which all would wait.
        else std::this_thread::yield();
      }
    }
  };

  std::shared_ptr<Shared> shared_;
  const int64_t helpers_;
  int64_t phase_ = 0;
};

#endif  // PALLAS_KERNELS_TEAM_H_
