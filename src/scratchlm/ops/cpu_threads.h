// The threads that C++ kernels run on: torch's, where it has any.

#pragma once

#include <exception>
#include <functional>
#include <thread>
#include <vector>

// OpenMP's, where torch brought it: its threads are awake and would stand in the way of new ones.
#ifdef __linux__
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
#else
constexpr void (*GOMP_parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
#endif

namespace {

// Call run() on as many threads as are available, at most `threads`.
template <class Run>
void on_threads(Run& run, int threads) {
    if (GOMP_parallel != nullptr)
        return GOMP_parallel([](void* of) { (*(Run*)of)(); }, &run, threads, 0);
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < threads; ++i) others.emplace_back(std::ref(run));
    } catch (const std::exception&) {  // no more threads: those that are there do it
    }
    run();
    for (std::thread& other : others) other.join();
}

}  // namespace
