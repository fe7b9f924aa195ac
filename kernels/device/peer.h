// Memory shared by the ranks of a node, and waiting for other ranks.
//
// Each rank has a slab of memory, accessible to all ranks. Block b of a rank communicates only with block b of each
// other rank. Every progress counter has a single writing rank, and only grows; so no atomic operation is needed
// between GPUs, and a late reader loses nothing. Every wait is bounded: the wait ends with the event, with a failure of
// another block of this rank, with an abort by the host, or at the deadline. Private names: `channel` is the number of
// a block, `Line` a record of progress counters, `epoch` the number of an operation, `patience` the deadline.
#pragma once

#include "emulation/fibers.h"
#include "device/walk.h"

constexpr u32 MOST_RANKS = 16;
constexpr u32 SPINS = 1024;  // tests between two reads of the clock: clock and control block are slow to read

// The layout of a slab: offsets in bytes from the beginning, and the capacities.
struct Heap {
    u64 slabs[MOST_RANKS];  // all slabs, at addresses valid on this rank
    u64 control;            // this rank's `Control`; outside the slab, so that the host can write while a kernel runs
    u64 patience;           // the deadline of a wait in nanoseconds
    u32 rank, ranks, depth;
    u64 lines, books, packets, ll128, slots, staging;
    u64 packet_room, ll128_room, slot_bytes, staging_bytes;  // bytes: for one writing rank (two), a slot, a section
};

// The failure of this rank. `aborted` is set by a failed wait or by the host; `failures` counts failed waits. The other
// fields are valid if `where` is not 0.
struct Control {
    u64 aborted, failures, where, peer, wanted, seen;
};

// The beginning of a slab, used only by the kernels of the owner: the number of the last direct operation, tickets, and
// for either buffer of packets the operation that has renewed it last (peer_packets.cu).
struct State {
    u64 epoch;
    u32 started, ended;
    u64 renewed[2];
};

// The progress counters of a block, written by the same block of another rank. The record takes 128 bytes: two writers
// never share a cache line.
struct Line {
    u64 met;       // number of the last meeting reached by the writer
    u64 arrived;   // pieces put by the writer into the slots of this slab
    u64 consumed;  // pieces of this rank, taken by the writer from its own slots
    u64 compared[2];  // values compared between all ranks, see `is_alike`
    u64 unused[11];
};

// The pieces exchanged with another rank by a block since the creation of the slab, kept between launches.
struct Book {
    u64 sent, received;
};

constexpr u64 MEETINGS = 3;    // the most meetings of an operation, or of a section of it
constexpr u64 GONE = ~u64(0);  // replaces `met` for ever once the writing block has given up

// The awaited event, for the error message. The numbers are read by the host.
enum Wanted : u32 { A_MEETING = 1, A_PACKET, A_PIECE };

GC_DEV State* state_of(const Heap& heap) { return static_cast<State*>(pointer_to(heap.slabs[heap.rank])); }
GC_DEV Line* line_of(const Heap& heap, u32 owner, u32 channel, u32 writer) {
    return static_cast<Line*>(pointer_to(heap.slabs[owner] + heap.lines)) + channel * heap.ranks + writer;
}
GC_DEV Book* book_of(const Heap& heap, u32 channel, u32 peer) {
    return static_cast<Book*>(pointer_to(heap.slabs[heap.rank] + heap.books)) + channel * heap.ranks + peer;
}

// ---------------------------------------------------------------- waiting

// Record a failed wait. Only the first failure is kept: later failures often follow from the first. The release store
// to `where` publishes the three fields before.
GC_DEV void fail(const Heap& heap, Wanted what, u32 peer, u64 wanted, u64 seen) {
    Control* const control = static_cast<Control*>(pointer_to(heap.control));
    if (take_ticket(address_of(&control->failures), ~0u) == 0) {
        store_relaxed(address_of(&control->peer), peer);
        store_relaxed(address_of(&control->wanted), wanted);
        store_relaxed(address_of(&control->seen), seen);
        store_release(address_of(&control->where), what);
    }
    store_release(address_of(&control->aborted), 1);
}
// Relaxed: no data depend on the flag, and waiting blocks read the flag again and again.
GC_DEV bool is_aborted(const Heap& heap) {
    return load_relaxed(address_of(&static_cast<const Control*>(pointer_to(heap.control))->aborted)) != 0;
}

// The threads waiting together, all for one outcome: a single thread, or the threads of a row.
struct Alone {
    GC_DEV static bool all(bool own) { return own; }
};
struct WholeRow {
    GC_DEV static bool all(bool own) { return row_all(own); }
};

// Wait until `come(seen)` is true for all waiting threads; return false after an abort or at the deadline. `come` sets
// `seen` to the progress of `peer`. `peer` is a reference because `come` may change the awaited rank. All waiting
// between ranks goes through this function, so every wait has a deadline. The clock is read after SPINS tests at the
// earliest: short waits never read the clock.
template <class Waiting = Alone, class Come>
GC_DEV bool wait(const Heap& heap, Wanted what, const u32& peer, u64 wanted, const Come& come) {
    u64 seen = 0, deadline = 0;
    for (u32 spins = 1;; ++spins) {
        const bool here = come(seen);
        if (Waiting::all(here)) return true;
        if (spins % SPINS == 0) {
            const u64 now = nanoseconds();
            if (deadline == 0) deadline = now + heap.patience;
            if (!Waiting::all(!is_aborted(heap))) return false;
            if (!Waiting::all(now <= deadline)) {
                if (!here) fail(heap, what, peer, wanted, seen);
                return false;
            }
        }
        rest();
    }
}

// ---------------------------------------------------------------- blocks

// Return a number for this block, in the order of starting. The GPU may start blocks in any order (`blockIdx`). If only
// some blocks fit the GPU, the running blocks of every rank have the lowest numbers. So no running block waits for a
// block unable to start. A lone block is number 0, and saves a trip to memory.
GC_DEV u32 take_channel(const Heap& heap) {
    GC_SHARED(u32, channel, 1);
    if (gridDim.x == 1) return 0;
    if (threadIdx.x == 0) channel[0] = take_ticket(address_of(&state_of(heap)->started), gridDim.x - 1);
    __syncthreads();
    return channel[0];
}

// Return the number of this direct operation. Every rank waits for all others in every operation, so no rank is ahead
// by two operations.
GC_DEV u64 epoch_of(const Heap& heap) { return load_relaxed(address_of(&state_of(heap)->epoch)) + 1; }

// Publish the number for the next operation, by the last block to end. The number is common to all blocks, also blocks
// not launched this time. `renews`: the operation has renewed its buffer of packets. Relaxed: the end of the kernel orders
// the stores before the next kernel.
GC_DEV void end_epoch(const Heap& heap, u64 epoch, bool renews = false) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (gridDim.x > 1 && take_ticket(address_of(&state_of(heap)->ended), gridDim.x - 1) != gridDim.x - 1) return;
    store_relaxed(address_of(&state_of(heap)->epoch), epoch);
    if (renews) store_relaxed(address_of(&state_of(heap)->renewed[epoch % 2]), epoch);
}

// Meet the same block of all ranks: afterwards the writes of all these blocks before the meeting are visible to this
// block. Return false if some rank has not come.
//
// The barrier first, so that all writes of the block happen before the release stores. The acquire loads and the
// barrier at the end make the other ranks' writes visible to all threads of this block.
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

// Tell the same block of all ranks that this block has given up. A late rank then fails in `meet`, instead of writing
// into arrays the program may have freed or reused.
GC_DEV void leave(const Heap& heap, u32 channel) {
    for (u32 peer = threadIdx.x; peer < heap.ranks; peer += blockDim.x)
        if (peer != heap.rank) store_release(address_of(&line_of(heap, peer, channel, heap.rank)->met), GONE);
}

// Send two values to the same block of all ranks, to be compared after the next meeting. Relaxed: the meeting orders
// the stores.
GC_DEV void send_values(const Heap& heap, u32 channel, u64 first, u64 second) {
    for (u32 peer = threadIdx.x; peer < heap.ranks; peer += blockDim.x) {
        Line* const there = line_of(heap, peer, channel, heap.rank);
        store_relaxed(address_of(&there->compared[0]), first);
        store_relaxed(address_of(&there->compared[1]), second);
    }
}
// Return whether all ranks have sent the value `mine` in place `what`. All threads get the same answer. Call between
// the next meeting and the meeting after.
GC_DEV bool is_alike(const Heap& heap, u32 channel, u32 what, u64 mine) {
    bool alike = true;
    for (u32 peer = 0; peer < heap.ranks; ++peer)
        alike = alike && load_relaxed(address_of(&line_of(heap, heap.rank, channel, peer)->compared[what])) == mine;
    return alike;
}

// ---------------------------------------------------------------- what a block works on

// The elements from `start` on, `count` in all.
struct Range {
    u64 start, count;
};

// Return part `index` of `parts` of a range. Parts are whole words, except at the end of the range; the division
// depends only on count and dtype, never on addresses, so all ranks agree.
template <class T> GC_DEV Range part_of(Range whole, u32 parts, u32 index) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    const u64 words = (whole.count + PER_WORD - 1) / PER_WORD;
    const u64 first = words * index / parts * PER_WORD, last = words * (index + 1) / parts * PER_WORD;
    const u64 start = first < whole.count ? first : whole.count, stop = last < whole.count ? last : whole.count;
    return {whole.start + start, stop - start};
}

// Set all bytes of a result to 255, a NaN in every floating-point format. A rank is missing, so the result is
// incomplete: a program ignoring the error must not go on with plausible numbers. `nbytes` is 0 for integers. A failed
// block fills the whole result, not knowing the elements of the other blocks.
GC_DEV void fill_with_nan(u64 dst, u64 nbytes) {
    for (u64 i = threadIdx.x; i < nbytes; i += blockDim.x) store<u8>(dst + i, 255);
}

// The threads moving a range together: the thread's number, and the number of threads, a power of two.
struct Team {
    u32 index, count;
};
GC_DEV Team whole_block() { return {threadIdx.x, blockDim.x}; }

// Call job(batch) for this thread's share of `count` units: full batches first, then single units.
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
