// Small all-reduces between the processes of a node, on the host.
//
// Every rank writes its array into a slot of its own; the last one to come lets all go on, and each combines all slots
// in rank order. A rank cannot come to the call after next before all have read this one's slots, since it needs all
// of them for the next: two slots a rank, in turn, are enough.
#pragma once
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

static const uint64_t PATIENCE = 1000000;  // nanoseconds that a call waits before somebody looks at its deadline
static const uint64_t LINE = 64;

struct alignas(64) Line {
    std::atomic<uint64_t> count;
    std::atomic<uint32_t> call;  // the last one to which all have come
    std::atomic<uint32_t> sleepers;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes share no locks");

// How one rank sees its node; the line at the beginning of rank 0's area is everybody's.
struct View {
    Line* line;
    uint64_t ranks, rank;
    uint64_t spins, yields;  // looks at the line before the rank goes to sleep
    uint64_t slot;           // bytes
    char** areas;            // of every rank: a line, then two slots

    char* room(uint64_t of, uint64_t call) const { return areas[of] + LINE + (call & 1) * slot; }
};

static long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* patience) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, patience, nullptr, 0);
}

static bool is_over(const View& view, uint64_t call) {
    return static_cast<int32_t>(view.line->call.load(std::memory_order_acquire) - static_cast<uint32_t>(call)) >= 0;
}

static void breathe() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// This rank's slot is full.
static void arrive(const View& view, uint64_t call) {
    Line* line = view.line;
    if (line->count.fetch_add(1, std::memory_order_acq_rel) + 1 != view.ranks * call) return;
    line->call.store(static_cast<uint32_t>(call), std::memory_order_seq_cst);
    if (line->sleepers.load(std::memory_order_seq_cst) != 0) futex(&line->call, FUTEX_WAKE, INT_MAX, nullptr);
}

// Returns whether all have come, waiting for them at most about `PATIENCE`.
static bool have_come(const View& view, uint64_t call) {
    for (uint64_t look = 0; look < view.spins; look++) {
        breathe();
        if (is_over(view, call)) return true;
    }
    for (uint64_t look = 0; look < view.yields; look++) {
        sched_yield();
        if (is_over(view, call)) return true;
    }
    Line* line = view.line;
    const timespec nap = {0, static_cast<long>(PATIENCE)};
    line->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = line->call.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - static_cast<uint32_t>(call)) < 0) futex(&line->call, FUTEX_WAIT, seen, &nap);
    line->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return is_over(view, call);
}

struct Sum {
    template <class T> T operator()(T a, T b) const { return a + b; }
};
struct Product {
    template <class T> T operator()(T a, T b) const { return a * b; }
};
// NaN wins, as in NumPy.
struct Least {
    template <class T> T operator()(T a, T b) const { return a != a || a < b ? a : b; }
};
struct Greatest {
    template <class T> T operator()(T a, T b) const { return a != a || a > b ? a : b; }
};

template <class T, class Op> static void combine(const View& view, uint64_t call, char* to, uint64_t nbytes) {
    T* out = reinterpret_cast<T*>(to);
    const uint64_t count = nbytes / sizeof(T);
    const T* first = reinterpret_cast<const T*>(view.room(0, call));
    const T* second = reinterpret_cast<const T*>(view.room(1, call));
    for (uint64_t i = 0; i < count; i++) out[i] = Op()(first[i], second[i]);
    for (uint64_t rank = 2; rank < view.ranks; rank++) {
        const T* more = reinterpret_cast<const T*>(view.room(rank, call));
        for (uint64_t i = 0; i < count; i++) out[i] = Op()(out[i], more[i]);
    }
}

using Combine = void (*)(const View&, uint64_t, char*, uint64_t);

template <class T> static Combine combine_of(long op) {
    const Combine all[] = {combine<T, Sum>, combine<T, Product>, combine<T, Least>, combine<T, Greatest>};
    return op >= 0 && op < 4 ? all[op] : nullptr;
}

// Returns how to combine slots; `kind` and `op` are places in Python's tables.
static Combine combine_of(long kind, long op) {
    switch (kind) {
        case 0: return combine_of<float>(op);
        case 1: return combine_of<double>(op);
        case 2: return combine_of<int32_t>(op);
        case 3: return combine_of<int64_t>(op);
        case 4: return combine_of<uint32_t>(op);
        case 5: return combine_of<uint64_t>(op);
    }
    return nullptr;
}
