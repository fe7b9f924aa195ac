// Any schedule: a rank's program, executed round by round. Every block handles its own part of each range of elements.
//
// A message is cut into pieces. The sending rank writes pieces into free slots in the receiving rank's slab; the
// receiving rank copies or combines the pieces from its slots. Within a round a block executes any operation that can
// proceed, so no message waits for another message.
//
// Posting means counting a piece where the peer looks. The first warp of a block posts pieces and looks for the next
// piece. Meanwhile the other threads, a power of two, move data. The split hides the time of posting: a write to the
// other rank and back.
#include "device/peer_fold.h"

// A range of elements of a message or of a local write; `combine`: combine the received elements with the present ones.
struct Part {
    u64 start, count;
    u32 buffer;
    u32 combine;
};
// The messages to a peer, or from a peer, in a round, in order: `parts` entries of the table from `first` on.
struct Lane {
    u32 peer, receives;
    u32 first, parts;
};
// A local write: parts[first] is the destination, the `operands` next parts are the sources.
struct Write {
    u32 first, operands;
};
// A round: `before` local writes, then the messages, then `after` local writes. Each step starts after the step before.
struct Round {
    u32 first_lane, lanes;
    u32 first_write, before, after;
};

enum Buffer : u32 { INPUT, OUTPUT, SCRATCH, STAGING, BUFFERS };

// A lane for sending and a lane for receiving per peer.
constexpr u32 MOST_LANES = 2 * MOST_RANKS;

struct StepsArguments {
    Heap heap;
    u64 buffers[BUFFERS];
    u64 region;     // bytes of staging per block
    u64 nan_bytes;  // bytes of the output set to NaN if a rank is missing
    const Round* rounds;
    const Lane* lanes;
    const Part* parts;
    const Write* writes;
    u64 round_count, movers;
};

// The position of a lane: pieces since the creation of the slab, elements done of the current part, and current part.
struct Cursor {
    u64 number, done;
    u32 part;
};

// A piece claimed by the signalling thread for the movers. Without a piece, `lane` is one of the three values below.
struct Claim {
    u32 lane;
    Cursor at;
};

constexpr u32 ALL_DONE = ~0u, GIVEN_UP = ALL_DONE - 1, NONE_READY = ALL_DONE - 2;

// Thread roles: the last `movers` threads of a block move data; the first thread of the warp before signals.
GC_DEV bool signals() { return threadIdx.x == 0; }
GC_DEV bool moves(const StepsArguments& a) { return threadIdx.x + a.movers >= blockDim.x; }
GC_DEV Team team_of(const StepsArguments& a) { return {threadIdx.x + u32(a.movers) - blockDim.x, u32(a.movers)}; }

// dst = op(...), or a copy if there is a single source; executed by the movers.
template <class T, class Op, class Source>
GC_DEV void form(const StepsArguments& a, u64 dst, u32 sources, const Source& source, u64 count) {
    if (!moves(a)) return;
    if (sources == 1)
        copy_range<T>(team_of(a), dst, source(0), count);
    else
        fold<T, Op, 2>(team_of(a), Operands{sources, source, 1, [&](u32) { return dst; }}, count);
}

// The elements of a part handled by a block.
struct Share {
    u64 address, count;
};

// Return the block's share of a part. The staging area is divided by blocks, not by elements: the parts of different
// rounds overlap there, and a block must not overwrite elements still in use by another block.
template <class T> GC_DEV Share share_of(const StepsArguments& a, const Part& part, u32 channel) {
    const Range range = part_of<T>({0, part.count}, gridDim.x, channel);
    const u64 first = part.buffer == STAGING ? channel * a.region : range.start * sizeof(T);
    return {a.buffers[part.buffer] + part.start * sizeof(T) + first, range.count};
}

// Execute local writes in order, with a barrier between two writes: a write may read the result of the write before.
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

// A piece: address on this rank, number of elements, and elements left in the part.
struct Piece {
    u64 here, count, left;
};

template <class T> GC_DEV Piece piece_of(const StepsArguments& a, u32 channel, const Lane& lane, const Cursor& cursor) {
    const Share share = share_of<T>(a, a.parts[lane.first + cursor.part], channel);
    const u64 left = share.count - cursor.done, most = a.heap.slot_bytes / sizeof(T);
    return {share.address + cursor.done * sizeof(T), left < most ? left : most, left};
}

// Return the address of the slot for piece `number`. The slots of two blocks form a ring of `depth` slots.
GC_DEV u64 slot_of(const Heap& heap, u32 owner, u32 channel, u32 writer, u64 number) {
    const u64 slot = (u64(channel) * heap.ranks + writer) * heap.depth + number % heap.depth;
    return heap.slabs[owner] + heap.slots + slot * heap.slot_bytes;
}

// Return the address of this rank's own count of the lane's pieces. The next round or launch continues from the count.
GC_DEV u64 counter_of(const Heap& heap, u32 channel, const Lane& lane) {
    Book* const book = book_of(heap, channel, lane.peer);
    return address_of(lane.receives ? &book->received : &book->sent);
}

// Return the address of the peer's counter for a lane: pieces put into the slots here, or taken from the slots there.
GC_DEV u64 progress_of(const Heap& heap, u32 channel, const Lane& lane) {
    const Line* const line = line_of(heap, heap.rank, channel, lane.peer);
    return address_of(lane.receives ? &line->arrived : &line->consumed);
}

// Return the next lane after `last` with a piece ready to move. `open` is the first unfinished lane, for the report of
// a failed wait. Starting after `last` serves the lanes in turn.
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
        // A piece to receive must have arrived; a piece to send needs a free slot.
        const bool ready = lane.receives ? seen > cursor.number : cursor.number - seen < a.heap.depth;
        if (!ready) continue;
        // Acquire only once a piece is ready, not with every look: an acquire load invalidates the first-level
        // cache.
        load_acquire(progress);
        return index;
    }
    return open == round.lanes ? ALL_DONE : NONE_READY;
}

// Return the position of the piece after `at`.
template <class T> GC_DEV Cursor after(const StepsArguments& a, u32 channel, const Lane& lane, const Cursor& at) {
    const Piece piece = piece_of<T>(a, channel, lane, at);
    const bool ended = piece.count == piece.left;
    return {at.number + 1, ended ? 0 : at.done + piece.count, at.part + ended};
}

// Claim a piece ready to move, and advance the lane. Without a ready piece, return NONE_READY, or wait if `waits` is
// set.
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
        if (!wait(a.heap, A_PIECE, peer, cursors[open].number + 1, come)) lane = GIVEN_UP;
    }
    if (lane >= round.lanes) return {lane, {0, 0, 0}};
    const Cursor at = cursors[lane];
    cursors[lane] = after<T>(a, channel, a.lanes[round.first_lane + lane], at);
    return {lane, at};
}

// Move a piece between memory and slot, by the movers.
template <class T, class Op>
GC_DEV void move(const StepsArguments& a, u32 channel, const Lane& lane, const Cursor& at) {
    const Piece piece = piece_of<T>(a, channel, lane, at);
    const u32 owner = lane.receives ? a.heap.rank : lane.peer, writer = lane.receives ? lane.peer : a.heap.rank;
    const u64 slot = slot_of(a.heap, owner, channel, writer, at.number);
    const u64 dst = lane.receives ? piece.here : slot, src = lane.receives ? slot : piece.here;
    const u32 sources = lane.receives && a.parts[lane.first + at.part].combine ? 2 : 1;
    form<T, Op>(a, dst, sources, [&](u32 k) { return k + 1 == sources ? src : dst; }, piece.count);
}

// Tell the peer about a moved piece: the piece has arrived, or the slot is free. Call after a barrier following the
// move: the release store then publishes the accesses of all movers. The own count is read by this block
// only, in later rounds after a barrier and in later launches, so relaxed is enough.
GC_DEV void post(const StepsArguments& a, u32 channel, const Round& round, const Claim& moved) {
    const Lane& lane = a.lanes[round.first_lane + moved.lane];
    Line* const there = line_of(a.heap, lane.peer, channel, a.heap.rank);
    const u64 number = moved.at.number + 1;
    store_relaxed(counter_of(a.heap, channel, lane), number);
    store_release(address_of(lane.receives ? &there->consumed : &there->arrived), number);
}

// ---------------------------------------------------------------- rounds

// Move all pieces of a round; return false if a wait has failed.
//
// A pipeline of two claims: while the movers move a piece, the signalling thread posts the piece before and claims the
// next piece. If no piece is ready, the moved piece is posted before the block waits. Otherwise two ranks could wait
// for each other: the peer may need the unposted piece to proceed.
template <class T, class Op> GC_DEV bool exchange(const StepsArguments& a, u32 channel, const Round& round) {
    GC_SHARED(Cursor, cursors, MOST_LANES);
    GC_SHARED(Claim, claims, 2);
    for (u32 lane = threadIdx.x; lane < round.lanes; lane += blockDim.x)
        cursors[lane] = {load_relaxed(counter_of(a.heap, channel, a.lanes[round.first_lane + lane])), 0, 0};
    __syncthreads();
    if (signals()) claims[0] = claim<T>(a, channel, round, cursors, 0, true);
    __syncthreads();
    bool unposted = false;  // whether the piece before is moved but not posted
    u32 turn = 0;
    GC_ROLLED
    for (; claims[turn % 2].lane < round.lanes; ++turn) {
        const Claim moved = claims[turn % 2];
        Claim& next = claims[1 - turn % 2];  // still holds the piece before, until posted
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

// Execute all rounds of this rank's program.
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
