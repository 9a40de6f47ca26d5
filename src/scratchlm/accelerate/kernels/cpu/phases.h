// One step as a row of phases, each shared out among threads in units.
//
// A phase ends when its units are done, not when all threads have arrived: a thread that the
// machine is keeping from its work holds up nobody, unless it is in the middle of a unit.

#pragma once

#include <atomic>

#include "cpu_threads.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

inline void let_others_run() {
#if defined(__linux__)
    sched_yield();
#else
    std::this_thread::yield();
#endif
}

struct Progress {
    alignas(64) std::atomic<long> next{0};
    alignas(64) std::atomic<long> done{0};
};

// One thread's way through the phases; all threads go the same way.
class Phases {
    static constexpr int SPINS = 2000;  // some tens of microseconds
    Progress* progress;
    bool alone;

  public:
    Phases(Progress* progress, bool alone) : progress(progress), alone(alone) {}

    // `units` must not depend on anything a phase writes: a late thread may ask when it is written
    // anew, and would then wait for units that there never were.
    template <class Work>
    void run(long units, Work work) {
        if (alone) {
            for (long unit = 0; unit < units; ++unit) work(unit);
            return;
        }
        Progress& here = *progress++;
        for (long unit; (unit = here.next.fetch_add(1, std::memory_order_relaxed)) < units;) {
            work(unit);
            here.done.fetch_add(1, std::memory_order_release);
        }
        for (int spins = 0; here.done.load(std::memory_order_acquire) < units; ++spins)
            spins < SPINS ? pause_briefly() : let_others_run();
    }
};

}  // namespace
