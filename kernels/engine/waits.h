// Waits for another rank's progress counter: spin, yield, then sleep in a futex.
//
// Memory orders. Storing the counter publishes all earlier writes (release); loading the counter (acquire) makes
// these writes readable. All fields read after a load of the counter are therefore relaxed. If two ranks each store a
// word and then load another (counter and `sleepers`; `listens` of both), only seq_cst forbids that both miss the
// store.
#pragma once
#include <cerrno>
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/node.h"

namespace gpucoll {

// A sleep ends after this many nanoseconds: Python must check deadline, signals and dead ranks now and then. Among many
// threads of a process, which share Python's lock, the looks must be rarer: times the threads per core, or THRONG_WAIT.
static const uint64_t MAX_WAIT = 300000, THRONG_WAIT = 50000000;
// Nanoseconds for which a waiting rank spins, then yields: a sleep and its wake-up cost 10 to 50 us, more than a short
// wait. A yield longer than DEAR has handed the core to a process outside the job.
static const uint64_t SPIN = 100000, YIELD = 300000, DEAR = 500000;
// After dear yields at most this many waits sleep without a yield. Then a yield is tried again: the load may have
// gone.
static const uint32_t SLEEPS = 64;
// With more threads of this process per core, a waiting rank sleeps at once: yields of so many threads keep the cores
// from the awaited rank and from the holder of Python's lock.
static const uint32_t THRONG = 16;
static const int RELAXES = 8;              // looks before the clock is read, then pauses per look: the clock costs more

static long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* patience) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, patience, nullptr, 0);
}

// Pause the processor briefly: the pause leaves the core's resources to a sibling hardware thread.
static void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// Return the low 32 bits of the progress counter: a futex compares 32 bits, and these bits change with every store.
static std::atomic<uint32_t>* low(std::atomic<int64_t>* counter) {
    return reinterpret_cast<std::atomic<uint32_t>*>(counter) + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

// Store the progress counter: publish all earlier writes of this rank, then wake the sleeping ranks.
static void show(Head* head, int64_t counter) {
    // Relaxed: only a hint for `Backoff`.
    head->core.store(sched_getcpu(), std::memory_order_relaxed);
    // Both seq_cst: a sleeper adds to `sleepers`, then loads the counter. Either this load sees the sleeper, or the
    // sleeper sees the new counter. With release alone both could miss, and the wake-up would be lost.
    head->counter.store(counter, std::memory_order_seq_cst);
    if (head->sleepers.load(std::memory_order_seq_cst) != 0) futex(low(&head->counter), FUTEX_WAKE, INT_MAX, nullptr);
}

static uint64_t nanoseconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

// Note the begin of a wait, unless noted. A wait that ends before the first reading of the clock is not noted.
static void note_wait(Node& node, uint64_t time = 0) {
    if (node.waits_since == 0) node.waits_since = static_cast<int64_t>(time != 0 ? time : nanoseconds());
}

// The pauses between two looks at the awaited rank: spin, then yield, then sleep.
//
// Spinning is fastest while the awaited rank runs on another core. On the same core the awaited rank runs only after
// this rank has left the core; a yield switches within a few microseconds. If a process outside the job computes on
// this core, a yield gives the stranger a whole scheduler slice, several milliseconds: a dear yield. A sleep costs a
// wake-up, but no slice, so the waits after a dear yield sleep at once. A rank of the same job computing for a moment
// also costs a slice. So the number of sleeping waits doubles with each dear yield and is halved by each cheap yield.
// Eager calls of ranks sharing cores ignore slices: the awaited rank used the slice, for many calls, and a sleeper
// woken by the awaited rank would take the core away.
struct Backoff {
    Node& node;
    const Head* awaited;
    uint64_t began = 0, last = 0;  // nanoseconds: start of the present kind of pause, last look at the clock
    bool yields = false;

    // Let a short time pass. Return false if the rank should sleep.
    bool pause() {
        if (began == 0) {
            began = last = nanoseconds();
            note_wait(node, began);
            yields = !node.spins || awaited->core.load(std::memory_order_relaxed) == sched_getcpu();
        }
        if (!yields) {
            // Several pauses per clock reading: the clock costs more than a pause.
            for (int look = 0; look < RELAXES; look++) cpu_relax();
            last = nanoseconds();
            yields = last - began >= SPIN;
            if (yields) began = last;
            return true;
        }
        const bool minds_slices = node.spins || !node.was_eager;
        if (node.to_sleep > 0 && minds_slices) {
            node.to_sleep--;
            return false;
        }
        sched_yield();
        const uint64_t now = nanoseconds();
        // 1, 3, 7 ... waits sleep after the first, second, third dear yield in a row.
        if (now - last > DEAR && minds_slices) {
            node.sleeps = std::min(2 * node.sleeps + 1, SLEEPS);
            node.to_sleep = node.sleeps;
        }
        last = now;
        return now - began < YIELD;
    }
};

// Return whether a rank's progress counter has reached `counter`. A patient caller waits: SPIN, YIELD, then a sleep of
// at most MAX_WAIT. `sleeps` says: the wait before was in vain, so sleep at once. Every successful load is acquire:
// the caller reads bytes published by the rank before this counter.
static bool has_shown(Node& node, Head* head, int64_t counter, bool patient, bool sleeps = false) {
    if (head->counter.load(std::memory_order_acquire) >= counter) return true;
    if (!patient) {
        note_wait(node);
        return false;
    }
    // Most waits end in this loop, before the clock is read.
    for (int look = 0; node.spins && look < RELAXES; look++) {
        cpu_relax();
        if (head->counter.load(std::memory_order_acquire) >= counter) return true;
    }
    Backoff backoff = {node, head};
    sleeps |= node.crowd > THRONG;
    while (!sleeps && backoff.pause())
        if (head->counter.load(std::memory_order_acquire) >= counter) {
            if (backoff.yields && node.to_sleep == 0) node.sleeps /= 2;
            return true;
        }
    note_wait(node);
    const timespec nap = {0, static_cast<long>(node.crowd > THRONG ? THRONG_WAIT : MAX_WAIT * node.crowd)};
    // seq_cst on both: the counterpart of `show`. The futex itself returns at once if the counter has changed since
    // `seen`. A rank woken by another value of the counter sleeps on: a look by Python would cost much more.
    head->sleepers.fetch_add(1, std::memory_order_seq_cst);
    int64_t seen = head->counter.load(std::memory_order_seq_cst);
    while (seen < counter && (futex(low(&head->counter), FUTEX_WAIT, static_cast<uint32_t>(seen), &nap) == 0 || errno == EAGAIN))
        seen = head->counter.load(std::memory_order_seq_cst);
    head->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return head->counter.load(std::memory_order_acquire) >= counter;
}

// Return whether a rank waits for some root to show the call `base`. seq_cst: if two ranks each take the other for
// the root, at least one sees the other listening, and shows its own call.
static bool is_listening(const Node& node, uint32_t rank, int64_t base) {
    return node.heads[rank]->listens.load(std::memory_order_seq_cst) >= base;
}

}  // namespace gpucoll
