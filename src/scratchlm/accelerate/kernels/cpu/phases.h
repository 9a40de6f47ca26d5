// One step as a row of phases, each shared out among threads in units.
//
// A phase ends when its units are done, not when all threads have arrived: a thread that the
// machine is keeping from its work holds up nobody, unless it is in the middle of its share.

#pragma once

#include <algorithm>
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
    long threads;

  public:
    Phases(Progress* progress, int threads) : progress(progress), threads(threads) {}

    // `units` must not depend on anything a phase writes: a late thread may ask when it is written
    // anew, and would then wait for units that there never were.
    template <class Work>
    void run(long units, Work work) {
        run(units, work, [] {});
    }

    // `then`: what comes once, after all units, before anybody goes on. Whoever ends last does it.
    template <class Work, class Then>
    void run(long units, Work work, Then then) {
        if (threads == 1) {
            for (long unit = 0; unit < units; ++unit) work(unit);
            return then();
        }
        Progress& here = *progress++;
        long mine = 0;
        for (Share own; (own = share(units, take(here.next))).count > 0; mine += own.count)
            for (long i = 0; i < own.count; ++i) work(own.first + i);
        if (mine > 0 && here.done.fetch_add(mine, std::memory_order_acq_rel) + mine == units) {
            then();
            here.done.store(units + 1, std::memory_order_release);
        }
        long end = units > 0 ? units + 1 : 0;
        for (int spins = 0; here.done.load(std::memory_order_acquire) < end; ++spins)
            spins < SPINS ? pause_briefly() : let_others_run();
    }

  private:
    struct Share {
        long first, count;
    };
    static long take(std::atomic<long>& ticket) {
        return ticket.fetch_add(1, std::memory_order_relaxed);
    }
    // Units of a ticket: three quarters in equal parts, of what is left three quarters, and so on.
    // Every take costs what cores need to agree; the last shares are small, so that all end at once.
    Share share(long units, long ticket) const {
        for (long first = 0, left = units; left > 0; ticket -= threads) {
            long count = (3 * left + 4 * threads - 1) / (4 * threads);
            if (ticket < threads) {
                long before = std::min(left, ticket * count);
                return {first + before, std::min(count, left - before)};
            }
            first += threads * count;
            left -= threads * count;
        }
        return {units, 0};
    }
};

}  // namespace
