// A team of threads that plays a list of operations together, with a barrier after each.
//
// The threads are those of the OpenMP library already loaded by torch, when there is one (its GOMP_parallel is
// handed to us at start-up): a second pool would fight the first for the same cores. Otherwise plain threads.
#pragma once
#include <sched.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

typedef void (*ParallelRegion)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);
typedef int (*IntFunction)();

struct ThreadLibrary {
    ParallelRegion parallel = nullptr;
    IntFunction thread_index = nullptr, team_size = nullptr;
};
static ThreadLibrary thread_library;

INLINE void pause_core() {
#if defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // longer than `yield`, which most cores ignore
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

struct Team {
    int size = 1;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> generation{0};

    void barrier() {
        if (size == 1) return;
        int before = generation.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            generation.store(before + 1, std::memory_order_release);
            return;
        }
        // Spin for some microseconds, then let others have the core: it may be theirs that we wait for.
        for (int spins = 0; generation.load(std::memory_order_acquire) == before; ++spins) {
            if (spins < 400) pause_core();
            else sched_yield();
        }
    }
};

// One operation's share of work: units are handed out in order to whichever thread is free.
struct Work {
    std::atomic<int64_t>& next;
    template <class Body>
    void each(int64_t units, int64_t chunk, Body body) {
        for (;;) {
            int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
            if (begin >= units) return;
            body(begin, begin + chunk < units ? begin + chunk : units);
        }
    }
};

template <class Body>  // body(thread, team), called by every thread of the team
static void run_team(int threads, Body body) {
    Team team;
    if (threads <= 1) return body(0, team);
    struct Shared {
        Team* team;
        Body* body;
        std::atomic<int> ready{0};
    } shared{&team, &body, {}};
    if (thread_library.parallel) {
        thread_library.parallel(
            [](void* argument) {
                Shared& s = *(Shared*)argument;
                int index = thread_library.thread_index();
                if (index == 0) {  // the library may grant fewer threads than asked for
                    s.team->size = thread_library.team_size();
                    s.ready.store(1, std::memory_order_release);
                } else {
                    while (!s.ready.load(std::memory_order_acquire)) pause_core();
                }
                (*s.body)(index, *s.team);
            },
            &shared, (unsigned)threads, 0);
        return;
    }
    team.size = threads;
    std::vector<std::thread> others;
    for (int index = 1; index < threads; ++index) others.emplace_back([&, index] { body(index, team); });
    body(0, team);
    for (auto& thread : others) thread.join();
}
