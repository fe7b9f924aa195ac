// Any schedule: a rank's program, round by round, walked by every block on its part of each range of elements.
//
// What a rank sends it puts in pieces into slots at the other rank, as many as there are free ones; what it receives it
// takes out of its own. In a round a block does whatever can be done next, so that no message waits for another one.
//
// The first warp of a block posts pieces, that is, counts them where the other rank looks, and looks for the next one. The
// other threads, a power of two, move data meanwhile: to post takes as long as a write to the other rank and back.
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
    u64 round_count, movers;
};

// How far a lane is: pieces there ever were, parts of this round, elements of the block's share of the part.
struct Cursor {
    u64 number, done;
    u32 part;
};

// A piece of a lane that is being moved, or why there is none.
struct Claim {
    u32 lane;
    Cursor at;
};

constexpr u32 ALL_DONE = ~0u, FAILED = ALL_DONE - 1, NONE_READY = ALL_DONE - 2;

// The last `movers` threads of a block move data; of those before, a warp, the first signals.
GC_DEV bool signals() { return threadIdx.x == 0; }
GC_DEV bool moves(const StepsArguments& a) { return threadIdx.x + a.movers >= blockDim.x; }
GC_DEV Team team_of(const StepsArguments& a) { return {threadIdx.x + u32(a.movers) - blockDim.x, u32(a.movers)}; }

// dst = op(...), or the one source there is; by the threads that move.
template <class T, class Op, class Source>
GC_DEV void form(const StepsArguments& a, u64 dst, u32 sources, const Source& source, u64 count) {
    if (!moves(a)) return;
    if (sources == 1)
        copy_range<T>(team_of(a), dst, source(0), count);
    else
        fold<T, Op, 2>(team_of(a), Operands{sources, source, 1, [&](u32) { return dst; }}, count);
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
        form<T, Op>(a, dst.address, a.writes[w].operands,
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

// Where the other rank counts the pieces that it has put into a lane, or taken out of it.
GC_DEV u64 progress_of(const Heap& heap, u32 channel, const Lane& lane) {
    const Line* const line = line_of(heap, heap.rank, channel, lane.peer);
    return address_of(lane.receives ? &line->arrived : &line->consumed);
}

// Returns the next lane after `last` of which a piece can be moved. `open` is the first one that has not ended.
GC_DEV u32 ready_lane(const StepsArguments& a, u32 channel, const Round& round, const Cursor* cursors, u32 last, u32& open,
                      u64& seen) {
    const Lane* const lanes = a.lanes + round.first_lane;
    open = round.lanes;
    for (u32 k = 1; k <= round.lanes; ++k) {
        const u32 index = (last + k) % round.lanes;
        const Lane& lane = lanes[index];
        const Cursor& cursor = cursors[index];
        if (cursor.part == lane.parts) continue;
        if (index < open) open = index;
        const u64 progress = progress_of(a.heap, channel, lane);
        seen = load_relaxed(progress);
        const bool ready = lane.receives ? seen > cursor.number : cursor.number - seen < a.heap.depth;
        if (!ready) continue;
        load_acquire(progress);  // once, not at every look: it empties the processor's cache
        return index;
    }
    return open == round.lanes ? ALL_DONE : NONE_READY;
}

// The lane whose piece comes after `at`.
template <class T> GC_DEV Cursor after(const StepsArguments& a, u32 channel, const Lane& lane, const Cursor& at) {
    const Piece piece = piece_of<T>(a, channel, lane, at);
    const bool ended = piece.count == piece.left;
    return {at.number + 1, ended ? 0 : at.done + piece.count, at.part + ended};
}

// Returns a piece that can be moved, NONE_READY where there is none. With `waits` that is where a block waits.
template <class T>
GC_DEV Claim claim(const StepsArguments& a, u32 channel, const Round& round, Cursor* cursors, u32 last, bool waits) {
    u32 open = 0;
    u64 unused = 0;
    u32 lane = ready_lane(a, channel, round, cursors, last, open, unused);
    if (lane == NONE_READY && waits) {
        const u32 peer = a.lanes[round.first_lane + open].peer;
        const auto come = [&](u64& seen) {
            lane = ready_lane(a, channel, round, cursors, last, open, seen);
            return lane != NONE_READY;
        };
        if (!wait(a.heap, A_PIECE, peer, cursors[open].number + 1, come)) lane = FAILED;
    }
    if (lane >= round.lanes) return {lane, {0, 0, 0}};
    const Cursor at = cursors[lane];
    cursors[lane] = after<T>(a, channel, a.lanes[round.first_lane + lane], at);
    return {lane, at};
}

template <class T, class Op>
GC_DEV void move(const StepsArguments& a, u32 channel, const Lane& lane, const Cursor& at) {
    const Piece piece = piece_of<T>(a, channel, lane, at);
    const u32 owner = lane.receives ? a.heap.rank : lane.peer, writer = lane.receives ? lane.peer : a.heap.rank;
    const u64 slot = slot_of(a.heap, owner, channel, writer, at.number);
    const u64 dst = lane.receives ? piece.here : slot, src = lane.receives ? slot : piece.here;
    const u32 sources = lane.receives && a.parts[lane.first + at.part].combine ? 2 : 1;
    form<T, Op>(a, dst, sources, [&](u32 k) { return k + 1 == sources ? src : dst; }, piece.count);
}

// Tells the other rank that the piece is there, or its slot free.
GC_DEV void post(const StepsArguments& a, u32 channel, const Round& round, const Claim& moved) {
    const Lane& lane = a.lanes[round.first_lane + moved.lane];
    Line* const there = line_of(a.heap, lane.peer, channel, a.heap.rank);
    const u64 number = moved.at.number + 1;
    store_relaxed(counter_of(a.heap, channel, lane), number);
    store_release(address_of(lane.receives ? &there->consumed : &there->arrived), number);
}

// ---------------------------------------------------------------- rounds

// Moves all pieces of a round. While a piece is moved, the piece before is posted and the next one is looked for. Where
// none is ready, this one is posted before the block waits: the other rank may have to take it first.
template <class T, class Op> GC_DEV bool exchange(const StepsArguments& a, u32 channel, const Round& round) {
    GC_SHARED(Cursor, cursors, MOST_LANES);
    GC_SHARED(Claim, claims, 2);
    for (u32 lane = threadIdx.x; lane < round.lanes; lane += blockDim.x)
        cursors[lane] = {load_relaxed(counter_of(a.heap, channel, a.lanes[round.first_lane + lane])), 0, 0};
    __syncthreads();
    if (signals()) claims[0] = claim<T>(a, channel, round, cursors, 0, true);
    __syncthreads();
    bool unposted = false;  // whether the piece before is moved and not posted
    u32 turn = 0;
    GC_ROLLED
    for (; claims[turn % 2].lane < round.lanes; ++turn) {
        const Claim moved = claims[turn % 2];
        Claim& next = claims[1 - turn % 2];  // and the one before
        if (signals()) {
            if (unposted) post(a, channel, round, next);
            unposted = true;
            next = claim<T>(a, channel, round, cursors, moved.lane, false);
        } else {
            move<T, Op>(a, channel, a.lanes[round.first_lane + moved.lane], moved.at);
        }
        if (__syncthreads_and(!signals() || next.lane != NONE_READY)) continue;
        if (signals()) {
            post(a, channel, round, moved);
            unposted = false;
            next = claim<T>(a, channel, round, cursors, moved.lane, true);
        }
        __syncthreads();
    }
    if (unposted) post(a, channel, round, claims[1 - turn % 2]);
    return claims[turn % 2].lane == ALL_DONE;
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
