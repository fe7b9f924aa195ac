// Small all-reduces between the processes of a node, on the host.
//
// Every rank writes its array into a slot of its own; the last one to come lets all go on, and each combines all slots
// in rank order. A rank cannot come to the call after next before all have read this one's slots, since it needs all
// of them for the next: two slots a rank, in turn, are enough.
#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

struct alignas(64) Line {
    std::atomic<uint64_t> count;
    std::atomic<uint32_t> call;  // the last one to which all have come
    std::atomic<uint32_t> sleepers;
};

// How one rank sees its node; Python fills it in.
struct View {
    Line* line;
    uint64_t ranks;
    uint64_t spins, yields;  // looks at the line before the rank goes to sleep
    uint64_t slot;           // bytes
    const char* slots[1];    // of every rank: two slots; as many as there are ranks
};

// What is the same in all calls of one length, dtype and op; `kind` and `op` are places in Python's tables.
struct Step {
    View* view;
    char* to;
    uint64_t count, kind, op;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes share no locks");

static long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* patience) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, patience, nullptr, 0);
}

static bool is_over(const Line* line, uint32_t call) {
    return static_cast<int32_t>(line->call.load(std::memory_order_acquire) - call) >= 0;
}

static void breathe() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// This rank's slot is full.
extern "C" void arrive(View* view, uint64_t call) {
    Line* line = view->line;
    if (line->count.fetch_add(1, std::memory_order_acq_rel) + 1 != view->ranks * call) return;
    line->call.store(static_cast<uint32_t>(call), std::memory_order_seq_cst);
    if (line->sleepers.load(std::memory_order_seq_cst) != 0) futex(&line->call, FUTEX_WAKE, INT_MAX, nullptr);
}

// Returns whether all have come, waiting for them at most about `patience` nanoseconds.
static int have_come(View* view, uint64_t call, uint64_t patience) {
    Line* line = view->line;
    const uint32_t wanted = static_cast<uint32_t>(call);
    if (is_over(line, wanted)) return 1;
    if (patience == 0) return 0;
    for (uint64_t look = 0; look < view->spins; look++) {
        breathe();
        if (is_over(line, wanted)) return 1;
    }
    for (uint64_t look = 0; look < view->yields; look++) {
        sched_yield();
        if (is_over(line, wanted)) return 1;
    }
    const timespec nap = {static_cast<time_t>(patience / 1000000000), static_cast<long>(patience % 1000000000)};
    line->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = line->call.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - wanted) < 0) futex(&line->call, FUTEX_WAIT, seen, &nap);
    line->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return is_over(line, wanted);
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

template <class T, class Op> static void combine(const View* view, uint64_t call, char* to, uint64_t count) {
    const uint64_t half = (call & 1) * view->slot;
    T* out = reinterpret_cast<T*>(to);
    const T* first = reinterpret_cast<const T*>(view->slots[0] + half);
    const T* second = reinterpret_cast<const T*>(view->slots[1] + half);
    for (uint64_t i = 0; i < count; i++) out[i] = Op()(first[i], second[i]);
    for (uint64_t rank = 2; rank < view->ranks; rank++) {
        const T* more = reinterpret_cast<const T*>(view->slots[rank] + half);
        for (uint64_t i = 0; i < count; i++) out[i] = Op()(out[i], more[i]);
    }
}

template <class T> static void combine_by(uint64_t op, const View* view, uint64_t call, char* to, uint64_t count) {
    switch (op) {
        case 0: return combine<T, Sum>(view, call, to, count);
        case 1: return combine<T, Product>(view, call, to, count);
        case 2: return combine<T, Least>(view, call, to, count);
        case 3: return combine<T, Greatest>(view, call, to, count);
    }
}

static void gather(const Step* step, uint64_t call) {
    switch (step->kind) {
        case 0: return combine_by<float>(step->op, step->view, call, step->to, step->count);
        case 1: return combine_by<double>(step->op, step->view, call, step->to, step->count);
        case 2: return combine_by<int32_t>(step->op, step->view, call, step->to, step->count);
        case 3: return combine_by<int64_t>(step->op, step->view, call, step->to, step->count);
        case 4: return combine_by<uint32_t>(step->op, step->view, call, step->to, step->count);
        case 5: return combine_by<uint64_t>(step->op, step->view, call, step->to, step->count);
    }
}

// Combines the slots once all have come; returns whether it is done after at most about `patience` nanoseconds.
extern "C" int finish(const Step* step, uint64_t call, uint64_t patience) {
    if (!have_come(step->view, call, patience)) return 0;
    gather(step, call);
    return 1;
}

// All of it; what is not done is left to `finish`.
extern "C" int exchange(const Step* step, uint64_t call, uint64_t patience) {
    arrive(step->view, call);
    return finish(step, call, patience);
}
