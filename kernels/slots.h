// Collectives between the processes of a node, on the host.
//
// Every rank writes its array into a slot of its own; the last one to come lets all go on, and each takes from the
// others' slots what is for it. A rank cannot come to the call after next before all have read this one's slots, since
// it needs all of them for the next: two slots a rank, in turn, are enough. An all-reduce in one shot combines all
// slots in rank order; in two shots each rank combines a part, in its own slot, and when all have come once more, takes
// all parts. Long arrays go by in segments, which stay in the caches. What lies in memory that all ranks map is read
// there, and not copied to a slot before.
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

static const uint64_t PATIENCE = 300000;  // nanoseconds that a call waits before somebody looks at its deadline
static const uint64_t LINE = 64, BLOCK = 16384;  // bytes
static const uint64_t LONG = 1 << 14;              // bytes from which on an array is not copied, if others reach it
static const uint64_t SEGMENT = 1 << 22;           // bytes of an array in symmetric memory that go by at once
static const uint64_t MOST_SLABS = 64;

struct alignas(64) Line {
    std::atomic<uint64_t> count;
    std::atomic<uint32_t> meeting;  // the last one to which all have come
    std::atomic<uint32_t> sleepers;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes share no locks");

// Memory that all ranks map: where each rank's part of it is here.
struct Slab {
    uint64_t nbytes;
    char** bases;
};

// Where an array is: the number of a slab, from 1 on, and its first byte there; 0 for one that others cannot reach.
struct Place {
    uint64_t slab, offset;
};

// What a rank shows of its call: where its array is, if not in its slot, where its result will be, which call that is,
// and how many calls the rank has refused before it.
struct Sign {
    Place from, to;
    uint64_t tag, refusals;

    bool is_like(const Sign& other) const { return tag == other.tag && refusals == other.refusals; }
};

// How one rank sees its node; the line at the beginning of rank 0's area is everybody's.
struct View {
    Line* line;
    uint64_t ranks, rank;
    uint64_t spins, yields;  // looks at the line before the rank goes to sleep
    uint64_t slot;           // bytes
    char** areas;            // of every rank: a line, two signs, then two slots
    Slab slabs[MOST_SLABS];
    uint64_t known;          // how many of them

    char* room(uint64_t of, uint64_t turn) const { return areas[of] + 3 * LINE + (turn & 1) * slot; }
    Sign* sign(uint64_t of, uint64_t turn) const {
        return reinterpret_cast<Sign*>(areas[of] + (1 + (turn & 1)) * LINE);
    }

    // Returns how other ranks reach so many bytes.
    Place find(const char* from, uint64_t nbytes) const {
        for (uint64_t slab = 0; slab < known; slab++) {
            const char* base = slabs[slab].bases[rank];
            if (from >= base && from + nbytes <= base + slabs[slab].nbytes)
                return {slab + 1, static_cast<uint64_t>(from - base)};
        }
        return {0, 0};
    }

    char* reach(uint64_t of, const Place& place) const { return slabs[place.slab - 1].bases[of] + place.offset; }
};

struct Part {
    uint64_t start, length;
};

// Returns the bytes of a segment that one rank combines, when each does a part: whole lines.
static Part part_of(uint64_t rank, uint64_t ranks, uint64_t nbytes) {
    const uint64_t most = (nbytes / ranks + LINE) / LINE * LINE;
    const uint64_t start = rank * most < nbytes ? rank * most : nbytes;
    return {start, nbytes - start < most ? nbytes - start : most};
}

static long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* patience) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, patience, nullptr, 0);
}

static bool is_over(const View& view, uint64_t meeting) {
    const uint32_t last = view.line->meeting.load(std::memory_order_acquire);
    return static_cast<int32_t>(last - static_cast<uint32_t>(meeting)) >= 0;
}

static void breathe() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// This rank has come.
static void arrive(const View& view, uint64_t meeting) {
    Line* line = view.line;
    if (line->count.fetch_add(1, std::memory_order_acq_rel) + 1 != view.ranks * meeting) return;
    line->meeting.store(static_cast<uint32_t>(meeting), std::memory_order_seq_cst);
    if (line->sleepers.load(std::memory_order_seq_cst) != 0) futex(&line->meeting, FUTEX_WAKE, INT_MAX, nullptr);
}

// Returns whether all have come, waiting for them at most about `PATIENCE`.
static bool have_come(const View& view, uint64_t meeting) {
    for (uint64_t look = 0; look < view.spins; look++) {
        breathe();
        if (is_over(view, meeting)) return true;
    }
    for (uint64_t look = 0; look < view.yields; look++) {
        sched_yield();
        if (is_over(view, meeting)) return true;
    }
    Line* line = view.line;
    const timespec nap = {0, static_cast<long>(PATIENCE)};
    line->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = line->meeting.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - static_cast<uint32_t>(meeting)) < 0) futex(&line->meeting, FUTEX_WAIT, seen, &nap);
    line->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return is_over(view, meeting);
}

struct Sum {
    template <class T> T operator()(T a, T b) const { return static_cast<T>(a + b); }
};
struct Product {
    template <class T> T operator()(T a, T b) const { return static_cast<T>(a * b); }
};
// NaN wins, as in NumPy.
struct Least {
    template <class T> T operator()(T a, T b) const { return a != a || a < b ? a : b; }
};
struct Greatest {
    template <class T> T operator()(T a, T b) const { return a != a || a > b ? a : b; }
};

struct And {
    template <class T> T operator()(T a, T b) const { return static_cast<T>(a & b); }
};
struct Or {
    template <class T> T operator()(T a, T b) const { return static_cast<T>(a | b); }
};
struct Xor {
    template <class T> T operator()(T a, T b) const { return static_cast<T>(a ^ b); }
};

// Leaves op(a, b) in `to`, which may be one of them; arrays may begin at any byte.
template <class T, class Op> static void apply(const char* a, const char* b, char* to, uint64_t nbytes) {
    typedef T Anywhere __attribute__((aligned(1)));
    const Anywhere *left = reinterpret_cast<const Anywhere*>(a), *right = reinterpret_cast<const Anywhere*>(b);
    Anywhere* out = reinterpret_cast<Anywhere*>(to);
#pragma GCC ivdep
    for (uint64_t i = 0; i < nbytes / sizeof(T); i++) out[i] = Op()(T(left[i]), T(right[i]));
}

// Leaves the bytes from `start` on of all sources, combined in rank order, at `to`, which may be in one of them.
template <class T, class Op>
static void combine(const char* const* sources, uint64_t ranks, char* to, uint64_t start, uint64_t length) {
    alignas(LINE) char sum[BLOCK];
    const uint64_t block = ranks > 2 ? BLOCK : length;  // two go by in one stream
    for (uint64_t done = 0; done < length; done += block, start += block) {
        const uint64_t nbytes = length - done < block ? length - done : block;
        const char* left = sources[0] + start;
        for (uint64_t rank = 1; rank < ranks; rank++) {
            char* here = rank + 1 == ranks ? to + done : sum;
            apply<T, Op>(left, sources[rank] + start, here, nbytes);
            left = sum;
        }
    }
}

template <class T> static void divide(char* row, uint64_t nbytes, uint64_t ranks) {
    typedef T Anywhere __attribute__((aligned(1)));
    Anywhere* out = reinterpret_cast<Anywhere*>(row);
    for (uint64_t i = 0; i < nbytes / sizeof(T); i++) out[i] = T(out[i]) / T(ranks);
}

// The same for a mean: every block is divided while it is in a cache.
template <class T>
static void average(const char* const* sources, uint64_t ranks, char* to, uint64_t start, uint64_t length) {
    for (uint64_t done = 0; done < length; done += BLOCK) {
        const uint64_t nbytes = length - done < BLOCK ? length - done : BLOCK;
        combine<T, Sum>(sources, ranks, to + done, start + done, nbytes);
        divide<T>(to + done, nbytes, ranks);
    }
}

using Combine = void (*)(const char* const*, uint64_t, char*, uint64_t, uint64_t);
using Divide = void (*)(char*, uint64_t, uint64_t);

// Returns how to combine numbers; the last ops are of floats, or of integers, alone.
template <class T> static Combine number(long op) {
    const Combine all[] = {combine<T, Sum>, combine<T, Product>, combine<T, Least>, combine<T, Greatest>};
    return op >= 0 && op < 4 ? all[op] : nullptr;
}

template <class T> static Combine floating(long op) { return op == 4 ? average<T> : number<T>(op); }

template <class T> static Combine integer(long op) {
    const Combine bits[] = {combine<T, And>, combine<T, Or>, combine<T, Xor>};
    return op >= 5 && op < 8 ? bits[op - 5] : number<T>(op);
}

// Returns how to combine slots, null where that is not known here; `kind` and `op` are places in Python's tables.
static Combine combine_of(long kind, long op) {
    switch (kind) {
        case 0: return floating<float>(op);
        case 1: return floating<double>(op);
        case 2: return integer<int32_t>(op);
        case 3: return integer<int64_t>(op);
        case 4: return integer<uint32_t>(op);
        case 5: return integer<uint64_t>(op);
        case 6: return integer<int8_t>(op);
        case 7: return integer<uint8_t>(op);
        case 8: return integer<int16_t>(op);
        case 9: return integer<uint16_t>(op);
    }
    return nullptr;
}

static Divide divide_of(long kind) { return kind == 0 ? divide<float> : kind == 1 ? divide<double> : nullptr; }

// What a call does; Python has the same numbers.
enum What { ONE_SHOT, TWO_SHOT, ALL_GATHER, BROADCAST, ALL_TO_ALL, REDUCE_SCATTER, COPY };

// The call under way: a segment after each meeting of the ranks, of two shots after two of them. If all ranks' arrays
// are read where they are, they are shown once, and all is one segment; of two shots results must be reached as well,
// and segments remain. A meeting at the end makes sure that nobody reads an array any more.
struct Call {
    enum Stage { SHOWN, COMBINED, DONE };  // what all ranks have done when the meeting is over

    uint64_t turn, meeting;  // of the first segment they are 1
    What what;
    const char* from;
    char* to;
    uint64_t nbytes;         // of a block: what one rank gives, or what it gets, of each
    uint64_t root;
    Combine combine;
    uint64_t tag, refusals;  // alike where ranks make the same call
    bool differs;            // whether they do not: nothing was moved
    Sign sign;
    uint64_t start, length;  // of the segment, in every block
    Stage stage;
    bool in_place;           // whether nothing is in slots
    bool read;               // whether some rank's array is read where it is
    const char** sources;    // of all ranks, for the segment

    void begin(const View& view) {
        const bool apart = from != to || what == TWO_SHOT || what == BROADCAST;
        const bool reached = apart && nbytes >= LONG && what != ONE_SHOT;
        sign = {reached ? view.find(from, given(view)) : Place{},
                reached && what == TWO_SHOT ? view.find(to, nbytes) : Place{}, tag, refusals};
        start = 0;
        in_place = read = differs = false;
        show(view);
    }

    // After a meeting: returns whether all is done; if not, another meeting is next.
    bool go_on(const View& view) {
        if (stage == DONE) return true;
        if (stage == SHOWN && start == 0) look(view);
        if (differs) return true;
        if (stage == SHOWN && what == TWO_SHOT) {
            combine_part(view);
            return false;
        }
        stage == SHOWN ? take(view) : collect(view);
        start += length;
        if (start < nbytes) {
            in_place ? combine_part(view) : show(view);
        } else if (read) {
            come(view, DONE);
        }
        return start == nbytes && !read;
    }

  private:
    // Whether this rank gives a block to each rank.
    bool has_blocks() const { return what == ALL_TO_ALL || what == REDUCE_SCATTER; }

    uint64_t given(const View& view) const { return has_blocks() ? view.ranks * nbytes : nbytes; }

    // How many bytes of a slot are for one rank.
    uint64_t pitch(const View& view) const { return has_blocks() ? view.slot / view.ranks / LINE * LINE : view.slot; }

    // Shows this rank's segment, and comes to its first meeting.
    void show(const View& view) {
        turn++;
        length = nbytes - start < pitch(view) ? nbytes - start : pitch(view);
        if (sign.from.slab == 0) fill(view);
        *view.sign(view.rank, turn) = sign;
        come(view, SHOWN);
    }

    // Copies to the slot what others read there.
    void fill(const View& view) {
        char* room = view.room(view.rank, turn);
        const Part mine = part_of(view.rank, view.ranks, length);
        const uint64_t after = mine.start + mine.length;
        if (what == TWO_SHOT) {
            std::memcpy(room, from + start, mine.start);
            std::memcpy(room + after, from + start + after, length - after);
        } else if (has_blocks()) {
            for (uint64_t block = 0; block < view.ranks; block++)
                if (block != view.rank) std::memcpy(room + block * pitch(view), from + block * nbytes + start, length);
        } else if (what != BROADCAST || view.rank == root) {
            std::memcpy(room, from + start, length);
        }
    }

    void come(const View& view, Stage done) {
        stage = done;
        arrive(view, ++meeting);
    }

    // Sees what all ranks have shown.
    void look(const View& view) {
        for (uint64_t rank = 1; rank < view.ranks; rank++)
            differs = differs || !view.sign(rank, turn)->is_like(*view.sign(0, turn));
        uint64_t shown = 0, reached = 0;
        for (uint64_t rank = what == BROADCAST ? root : 0; rank < (what == BROADCAST ? root + 1 : view.ranks); rank++) {
            const Sign* found = view.sign(rank, turn);
            shown++;
            read = read || (found->from.slab != 0 && what != TWO_SHOT);
            reached += found->from.slab != 0 && (what != TWO_SHOT || found->to.slab != 0);
        }
        in_place = reached == shown;
        read = read || in_place;
        if (in_place && what != TWO_SHOT) length = nbytes;
    }

    void find_sources(const View& view) {
        const uint64_t block = has_blocks() ? view.rank : 0;
        for (uint64_t rank = 0; rank < view.ranks; rank++) {
            const Place& place = view.sign(rank, turn)->from;
            sources[rank] = place.slab == 0 ? view.room(rank, turn) + block * pitch(view)
                                            : view.reach(rank, place) + block * nbytes + start;
        }
        sources[view.rank] = from + block * nbytes + start;
    }

    void take(const View& view) {
        find_sources(view);
        if (what == ONE_SHOT || what == REDUCE_SCATTER) {
            combine(sources, view.ranks, to + start, 0, length);
        } else if (what == BROADCAST) {
            if (view.rank != root) std::memcpy(to + start, sources[root], length);
        } else {
            for (uint64_t distance = 1; distance <= view.ranks; distance++) {  // not all read the same one at first
                const uint64_t rank = (view.rank + distance) % view.ranks;
                char* here = to + rank * nbytes + start;
                if (here != sources[rank]) std::memcpy(here, sources[rank], length);
            }
        }
    }

    // Of two shots, the first.
    void combine_part(const View& view) {
        if (in_place) length = nbytes - start < SEGMENT ? nbytes - start : SEGMENT;
        find_sources(view);
        const Part mine = part_of(view.rank, view.ranks, length);
        char* here = in_place ? to + start : view.room(view.rank, turn);
        combine(sources, view.ranks, here + mine.start, mine.start, mine.length);
        come(view, COMBINED);
    }

    // And the second: takes all parts from those who combined them.
    void collect(const View& view) {
        for (uint64_t distance = in_place; distance < view.ranks; distance++) {
            const uint64_t rank = (view.rank + distance) % view.ranks;
            const Place& place = view.sign(rank, turn)->to;
            const char* result = in_place ? view.reach(rank, place) + start : view.room(rank, turn);
            const Part part = part_of(rank, view.ranks, length);
            std::memcpy(to + start + part.start, result + part.start, part.length);
        }
    }
};
