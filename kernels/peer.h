// What ranks share: a slab of memory each, which all of them reach, and how one waits for another.
//
// Block b of a rank has to do with block b of the others only. What a rank writes into another's slab, nobody else
// writes; counters only grow. A wait ends when what it is for has come, when another one has failed, or at the deadline.
#pragma once

#include "fibers.h"
#include "walk.h"

constexpr u32 MOST_RANKS = 16;
constexpr u32 SPINS = 1024;  // between looks at the clock

// Where everything is in a slab, in bytes from its beginning, and how much there is of it.
struct Heap {
    u64 slabs[MOST_RANKS];  // as this rank reaches them
    u64 control;            // of this rank; not in the slab, so that the host may write it while a kernel runs
    u64 patience;           // nanoseconds
    u32 rank, ranks, depth;
    u64 lines, books, packets, slots, staging;
    u64 packet_room, slot_bytes, staging_bytes;  // of what one rank writes at a time
};

// Why the ranks have come apart. `aborted` is set by a wait that has failed, or by the host; the rest is there when
// `where` is not 0.
struct Control {
    u64 aborted, failures, where, peer, wanted, seen;
};

// The beginning of a slab, for this rank's own kernels: how many direct operations there were, whose turn it is.
struct State {
    u64 epoch;
    u32 started, ended;
};

// What one rank's block tells another's, 128 bytes long, so that no two share a cache line.
struct Line {
    u64 met;       // at how many meeting points it was
    u64 arrived;   // how many pieces it has put into the slots here
    u64 consumed;  // how many pieces it has taken out of its own slots that were put there from here
    u64 told[2];   // what all ranks must say alike for something to be done
    u64 unused[11];
};

// How many pieces a block has exchanged with another rank's.
struct Book {
    u64 sent, received;
};

constexpr u64 GONE = ~u64(0);  // in the place of a number of meetings: this block comes to none any more

enum Wanted : u32 { A_MEETING = 1, A_PACKET, A_PIECE };

GC_DEV State* state_of(const Heap& heap) { return static_cast<State*>(pointer_to(heap.slabs[heap.rank])); }
GC_DEV Line* line_of(const Heap& heap, u32 owner, u32 channel, u32 writer) {
    return static_cast<Line*>(pointer_to(heap.slabs[owner] + heap.lines)) + channel * heap.ranks + writer;
}
GC_DEV Book* book_of(const Heap& heap, u32 channel, u32 peer) {
    return static_cast<Book*>(pointer_to(heap.slabs[heap.rank] + heap.books)) + channel * heap.ranks + peer;
}

// ---------------------------------------------------------------- waiting

GC_DEV void fail(const Heap& heap, Wanted what, u32 peer, u64 wanted, u64 seen) {
    Control* const control = static_cast<Control*>(pointer_to(heap.control));
    if (take_ticket(address_of(&control->failures), ~0u) == 0) {  // the first one says what was missing
        store_relaxed(address_of(&control->peer), peer);
        store_relaxed(address_of(&control->wanted), wanted);
        store_relaxed(address_of(&control->seen), seen);
        store_release(address_of(&control->where), what);
    }
    store_release(address_of(&control->aborted), 1);
}
GC_DEV bool is_aborted(const Heap& heap) {
    return load_relaxed(address_of(&static_cast<const Control*>(pointer_to(heap.control))->aborted)) != 0;
}

// Returns whether `come(seen)`, which says how far `peer` is, has become true; it may name another peer. All waiting is
// done here.
template <class Come> GC_DEV bool wait(const Heap& heap, Wanted what, const u32& peer, u64 wanted, const Come& come) {
    u64 seen = 0, deadline = 0;
    for (u32 spins = 1; !come(seen); ++spins) {
        if (spins % SPINS == 0) {
            const u64 now = nanoseconds();
            if (deadline == 0) deadline = now + heap.patience;
            if (is_aborted(heap)) return false;
            if (now > deadline) {
                fail(heap, what, peer, wanted, seen);
                return false;
            }
        }
        rest();
    }
    return true;
}

// ---------------------------------------------------------------- blocks

// Which block this is, by the order in which they have begun: a GPU may begin with any. Those under way are the lowest
// of every rank's, so that none waits for one that cannot begin.
GC_DEV u32 take_channel(const Heap& heap) {
    GC_SHARED(u32, channel, 1);
    if (threadIdx.x == 0) channel[0] = take_ticket(address_of(&state_of(heap)->started), gridDim.x - 1);
    __syncthreads();
    return channel[0];
}

// The number of this direct operation. Every rank waits for every other in each, so that none is two of them ahead.
GC_DEV u64 epoch_of(const Heap& heap) { return load_relaxed(address_of(&state_of(heap)->epoch)) + 1; }

// The last block to end lets the next operation have the next number, also blocks that this one did not need.
GC_DEV void end_epoch(const Heap& heap, u64 epoch) {
    __syncthreads();
    if (threadIdx.x == 0 && take_ticket(address_of(&state_of(heap)->ended), gridDim.x - 1) == gridDim.x - 1)
        store_relaxed(address_of(&state_of(heap)->epoch), epoch);
}

// Returns when this block of every rank is here, and all see what it has written; false where one has not come.
GC_DEV bool meet(const Heap& heap, u32 channel, u64 wanted) {
    __syncthreads();
    for (u32 peer = threadIdx.x; peer < heap.ranks; peer += blockDim.x)
        store_release(address_of(&line_of(heap, peer, channel, heap.rank)->met), wanted);
    bool all = true;
    for (u32 peer = threadIdx.x; peer < heap.ranks; peer += blockDim.x) {
        const u64 met = address_of(&line_of(heap, heap.rank, channel, peer)->met);
        u64 last = 0;
        all = all && wait(heap, A_MEETING, peer, wanted,
                          [&](u64& seen) { return (seen = last = load_acquire(met)) >= wanted; });
        if (all && last == GONE) {
            fail(heap, A_MEETING, peer, wanted, last);
            all = false;
        }
    }
    return __syncthreads_and(all);
}

// Tells this block of every rank that this one has given up. A rank that comes late then writes nothing into arrays which
// the program may have used again.
GC_DEV void leave(const Heap& heap, u32 channel) {
    for (u32 peer = threadIdx.x; peer < heap.ranks; peer += blockDim.x)
        if (peer != heap.rank) store_release(address_of(&line_of(heap, peer, channel, heap.rank)->met), GONE);
}

// Tells this block of every rank what is compared when they have met.
GC_DEV void tell(const Heap& heap, u32 channel, u64 first, u64 second) {
    for (u32 peer = threadIdx.x; peer < heap.ranks; peer += blockDim.x) {
        Line* const there = line_of(heap, peer, channel, heap.rank);
        store_relaxed(address_of(&there->told[0]), first);
        store_relaxed(address_of(&there->told[1]), second);
    }
}
// Returns whether all ranks have told this one's word: the same to every thread, until the next meeting.
GC_DEV bool is_alike(const Heap& heap, u32 channel, u32 what, u64 mine) {
    bool alike = true;
    for (u32 peer = 0; peer < heap.ranks; ++peer)
        alike = alike && load_relaxed(address_of(&line_of(heap, heap.rank, channel, peer)->told[what])) == mine;
    return alike;
}

// ---------------------------------------------------------------- what a block works on

// Elements `start` and `count` more.
struct Range {
    u64 start, count;
};

// Part `index` of `parts` of a range, in whole words: the same elements in the same part wherever they lie.
template <class T> GC_DEV Range part_of(Range whole, u32 parts, u32 index) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    const u64 words = (whole.count + PER_WORD - 1) / PER_WORD;
    const u64 first = words * index / parts * PER_WORD, last = words * (index + 1) / parts * PER_WORD;
    const u64 start = first < whole.count ? first : whole.count, stop = last < whole.count ? last : whole.count;
    return {whole.start + start, stop - start};
}

// Makes a result NaN, by all bits set, in whichever format: a rank has not come, so that the result is not complete, and
// a program that has not asked for the error must not go on with it. `nbytes` is 0 for integers. A block that has waited
// in vain does so for all blocks: it does not know which elements are theirs.
GC_DEV void fill_with_nan(u64 dst, u64 nbytes) {
    for (u64 i = threadIdx.x; i < nbytes; i += blockDim.x) store<u8>(dst + i, 255);
}

// The threads that move a range together: `index` is this one's, `count` a power of two.
struct Team {
    u32 index, count;
};
GC_DEV Team whole_block() { return {threadIdx.x, blockDim.x}; }

// Calls job(batch) for the batches that are the thread's share of `count` units.
template <u32 AT_ONCE, class Job> GC_DEV void for_team(Team team, u64 count, const Job& job) {
    const u64 threads = team.count, tile = threads * AT_ONCE, tiled = count & ~(tile - 1);
    GC_ROLLED
    for (u64 first = team.index; first < tiled; first += tile) job(Batch<AT_ONCE>{first, threads});
    GC_ROLLED
    for (u64 first = tiled + team.index; first < count; first += threads) job(Batch<1>{first, threads});
}

template <class Unit, u32 AT_ONCE, class Place>
GC_DEV void copy_batch(u64 dst, u64 src, const Batch<AT_ONCE>& batch, const Place& place) {
    Unit units[AT_ONCE];
    batch.read(units, pointer_to(src), place);
    batch.write(pointer_to(dst), units, place);
}

// dst = src.
template <class T> GC_DEV void copy_range(Team team, u64 dst, u64 src, u64 count) {
    const Layout layout = layout_of<T>(dst, dst ^ src, count);
    const Evenly words = words_of<T>(layout);
    const Edges<T> edges = edges_of<T>(layout);
    for_team<4>(team, layout.words, [&](const auto& batch) { copy_batch<Word>(dst, src, batch, words); });
    for_team<4>(team, layout.edges, [&](const auto& batch) { copy_batch<T>(dst, src, batch, edges); });
}
