// Any schedule: a rank's program, round by round, walked by every block on its part of each range of elements.
//
// What a rank sends it puts in pieces into slots at the other rank, as many as there are free ones; what it receives it
// takes out of its own. In a round a block does whatever can be done next, so that no message waits for another one.
#include "peer_fold.h"

struct Part {
    u64 start, count;
    u32 buffer;
    u32 combine;  // whether what comes is combined with what is there
};
// All that goes to, or comes from, one rank in a round, in order.
struct Lane {
    u32 peer, receives;
    u32 first, parts;
};
// dst and its operands: parts, one after the other.
struct Write {
    u32 first, operands;
};
// What is formed aside before messages, the messages, and what is written after them, each when the one before has been.
struct Round {
    u32 first_lane, lanes;
    u32 first_write, before, after;
};

enum Buffer : u32 { INPUT, OUTPUT, SCRATCH, STAGING, BUFFERS };

constexpr u32 MOST_LANES = 2 * MOST_RANKS;

struct StepsArguments {
    Heap heap;
    u64 buffers[BUFFERS];
    u64 region;     // bytes of staging that a block has
    u64 nan_bytes;  // of the output, where a rank does not come
    const Round* rounds;
    const Lane* lanes;
    const Part* parts;
    const Write* writes;
    u64 round_count;
};

// How far a lane is: pieces there ever were, parts of this round, elements of the block's share of the part.
struct Cursor {
    u64 number, done;
    u32 part;
};

constexpr u32 ALL_DONE = ~0u, FAILED = ALL_DONE - 1;

// dst = op(...), or the one source there is.
template <class T, class Op, class Source> GC_DEV void form(u64 dst, u32 sources, const Source& source, u64 count) {
    if (sources == 1)
        copy_range<T>(dst, source(0), count);
    else
        fold<T, Op>(dst, sources, source, count);
}

struct Share {
    u64 address, count;
};

// The block's share of a part. In staging, where every round has other parts, it lies in the block's own region.
template <class T> GC_DEV Share share_of(const StepsArguments& a, const Part& part, u32 channel) {
    const Range range = part_of<T>({0, part.count}, gridDim.x, channel);
    const u64 first = part.buffer == STAGING ? channel * a.region : range.start * sizeof(T);
    return {a.buffers[part.buffer] + part.start * sizeof(T) + first, range.count};
}

template <class T, class Op> GC_DEV void write(const StepsArguments& a, u32 channel, u32 first, u32 writes) {
    for (u32 w = first; w < first + writes; ++w) {
        if (w > first) __syncthreads();
        const Part* const parts = a.parts + a.writes[w].first;
        const Share dst = share_of<T>(a, parts[0], channel);
        form<T, Op>(dst.address, a.writes[w].operands,
                    [&](u32 k) { return share_of<T>(a, parts[k + 1], channel).address; }, dst.count);
    }
}

// ---------------------------------------------------------------- pieces

struct Piece {
    u64 here, count, left;
};

template <class T> GC_DEV Piece piece_of(const StepsArguments& a, u32 channel, const Lane& lane, const Cursor& cursor) {
    const Share share = share_of<T>(a, a.parts[lane.first + cursor.part], channel);
    const u64 left = share.count - cursor.done, most = a.heap.slot_bytes / sizeof(T);
    return {share.address + cursor.done * sizeof(T), left < most ? left : most, left};
}

GC_DEV u64 slot_of(const Heap& heap, u32 owner, u32 channel, u32 writer, u64 number) {
    const u64 slot = (u64(channel) * heap.ranks + writer) * heap.depth + number % heap.depth;
    return heap.slabs[owner] + heap.slots + slot * heap.slot_bytes;
}

GC_DEV u64 counter_of(const Heap& heap, u32 channel, const Lane& lane) {
    Book* const book = book_of(heap, channel, lane.peer);
    return address_of(lane.receives ? &book->received : &book->sent);
}

GC_DEV bool is_ready(const Heap& heap, u32 channel, const Lane& lane, u64 number, u64& seen) {
    const Line* const line = line_of(heap, heap.rank, channel, lane.peer);
    seen = load_acquire(address_of(lane.receives ? &line->arrived : &line->consumed));
    return lane.receives ? seen > number : number - seen < heap.depth;
}

// Returns the next lane after `last` of which a piece can be moved: this is where a block waits.
GC_DEV u32 choose(const StepsArguments& a, u32 channel, const Round& round, const Cursor* cursors, u32 last) {
    const Lane* const lanes = a.lanes + round.first_lane;
    u32 open = 0;
    while (open < round.lanes && cursors[open].part == lanes[open].parts) ++open;
    if (open == round.lanes) return ALL_DONE;
    u32 chosen = FAILED;
    wait(a.heap, A_PIECE, lanes[open].peer, cursors[open].part, [&](u64& seen) {
        for (u32 k = 1; k <= round.lanes && chosen == FAILED; ++k) {
            const u32 lane = (last + k) % round.lanes;
            const Cursor& cursor = cursors[lane];
            if (cursor.part < lanes[lane].parts && is_ready(a.heap, channel, lanes[lane], cursor.number, seen))
                chosen = lane;
        }
        return chosen != FAILED;
    });
    return chosen;
}

template <class T, class Op>
GC_DEV void move(const StepsArguments& a, u32 channel, const Lane& lane, const Cursor& cursor) {
    const Piece piece = piece_of<T>(a, channel, lane, cursor);
    const u32 owner = lane.receives ? a.heap.rank : lane.peer, writer = lane.receives ? lane.peer : a.heap.rank;
    const u64 slot = slot_of(a.heap, owner, channel, writer, cursor.number);
    const u64 dst = lane.receives ? piece.here : slot, src = lane.receives ? slot : piece.here;
    const u32 sources = lane.receives && a.parts[lane.first + cursor.part].combine ? 2 : 1;
    form<T, Op>(dst, sources, [&](u32 k) { return k + 1 == sources ? src : dst; }, piece.count);
}

// Tells the other rank that the piece is there, or its slot free.
template <class T> GC_DEV void post(const StepsArguments& a, u32 channel, const Lane& lane, Cursor& cursor) {
    const Piece piece = piece_of<T>(a, channel, lane, cursor);
    Line* const there = line_of(a.heap, lane.peer, channel, a.heap.rank);
    const u64 number = cursor.number + 1;
    store_relaxed(counter_of(a.heap, channel, lane), number);
    store_release(address_of(lane.receives ? &there->consumed : &there->arrived), number);
    const bool ended = piece.count == piece.left;
    cursor = {number, ended ? 0 : cursor.done + piece.count, cursor.part + ended};
}

// ---------------------------------------------------------------- rounds

template <class T, class Op> GC_DEV bool exchange(const StepsArguments& a, u32 channel, const Round& round) {
    GC_SHARED(Cursor, cursors, MOST_LANES);
    GC_SHARED(u32, chosen, 1);
    for (u32 lane = threadIdx.x; lane < round.lanes; lane += blockDim.x)
        cursors[lane] = {load_relaxed(counter_of(a.heap, channel, a.lanes[round.first_lane + lane])), 0, 0};
    __syncthreads();
    for (u32 last = 0;;) {
        if (threadIdx.x == 0) chosen[0] = choose(a, channel, round, cursors, last);
        __syncthreads();
        last = chosen[0];
        if (last == ALL_DONE || last == FAILED) return last == ALL_DONE;
        const Lane lane = a.lanes[round.first_lane + last];
        move<T, Op>(a, channel, lane, cursors[last]);
        __syncthreads();
        if (threadIdx.x == 0) post<T>(a, channel, lane, cursors[last]);
    }
}

template <class T, class Op> GC_DEV void steps(const StepsArguments& a) {
    const u32 channel = take_channel(a.heap);
    bool together = true;
    GC_ROLLED
    for (u64 r = 0; together && r < a.round_count; ++r) {
        const Round round = a.rounds[r];
        __syncthreads();  // what one thread has written, another one reads
        write<T, Op>(a, channel, round.first_write, round.before);
        together = exchange<T, Op>(a, channel, round);
        if (together) write<T, Op>(a, channel, round.first_write + round.before, round.after);
    }
    if (!together) fill_with_nan(a.buffers[OUTPUT], a.nan_bytes);
}
