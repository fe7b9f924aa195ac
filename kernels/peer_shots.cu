// All-reduce by reading each other's arrays: where they lie, if all ranks reach them there, or in pieces that are copied
// into the slabs first.
//
// Every block meets the others' blocks of its number between the steps, and the elements that it reads of a rank's
// array are those which that rank's block of its number has written. Sums are formed in the order of ranks.
#include "peer_fold.h"

struct ShotsArguments {
    Heap heap;
    const void* src;
    void* dst;
    u64 count;
    u64 source_mark, result_mark;  // not 0 and the same on all ranks: then these are read where they lie
    u64 sources[MOST_RANKS];       // where each rank's input is read
    u64 results[MOST_RANKS];       // where each rank's part of the result is read
};

constexpr u64 MEETINGS = 4;  // over one piece at most

// Elements on which all ranks work at a time, and whether input and results are read where they lie.
struct Piece {
    u64 start, count;
    bool sources, results;
};

GC_DEV u64 staging_of(const Heap& heap, u32 rank) { return heap.slabs[rank] + heap.staging; }

// Where a rank's input, and its part of the result, begin.
template <class T> GC_DEV u64 source_of(const ShotsArguments& a, const Piece& piece, u32 rank) {
    return piece.sources ? a.sources[rank] + piece.start * sizeof(T) : staging_of(a.heap, rank);
}
template <class T> GC_DEV u64 result_of(const ShotsArguments& a, const Piece& piece, u32 rank) {
    return piece.results ? a.results[rank] + piece.start * sizeof(T) : staging_of(a.heap, rank);
}

template <class T> GC_DEV void stage(const ShotsArguments& a, const Piece& piece, Range range) {
    const u64 own = staging_of(a.heap, a.heap.rank), src = address_of(a.src) + piece.start * sizeof(T);
    copy_range<T>(own + range.start * sizeof(T), src + range.start * sizeof(T), range.count);
}

template <class T, class Op>
GC_DEV void fold_all(const ShotsArguments& a, const Piece& piece, u64 dst, Range range) {
    const u64 offset = range.start * sizeof(T);
    fold<T, Op>(dst + offset, a.heap.ranks, [&](u32 rank) { return source_of<T>(a, piece, rank) + offset; },
                range.count);
}

// Returns whether all ranks are here with the first piece, and have agreed on where they read.
template <class Stage>
GC_DEV bool agree(const ShotsArguments& a, u32 channel, u64 epoch, Piece& piece, const Stage& stage_piece) {
    tell(a.heap, channel, a.source_mark, a.result_mark);
    if (a.source_mark == 0) stage_piece(piece);
    if (!meet(a.heap, channel, MEETINGS * epoch)) return false;
    const bool alike = is_alike(a.heap, channel, 0, a.source_mark);
    piece.sources = alike && a.source_mark != 0;
    piece.results = is_alike(a.heap, channel, 1, a.result_mark) && a.result_mark != 0;
    if (piece.sources && piece.results) piece.count = a.count;
    if (alike) return true;
    if (a.source_mark != 0) stage_piece(piece);  // the others cannot read it where it lies, or it is elsewhere there
    return meet(a.heap, channel, MEETINGS * epoch + 1);
}

// Calls stage_piece(piece) before, and work(piece, epoch) when all ranks have staged; `work` returns whether they are
// together to its end, when nobody reads any more.
template <class T, class Stage, class Work>
GC_DEV void for_pieces(const ShotsArguments& a, u32 channel, const Stage& stage_piece, const Work& work) {
    const u64 most = a.heap.staging_bytes / sizeof(T);
    u64 epoch = epoch_of(a.heap);
    Piece piece = {0, a.count < most ? a.count : most, false, false};
    bool together = agree(a, channel, epoch, piece, stage_piece) && work(piece, epoch);
    GC_ROLLED
    for (piece.start = piece.count; together && piece.start < a.count; piece.start += piece.count) {
        const u64 left = a.count - piece.start;
        piece.count = left < most ? left : most;
        ++epoch;
        if (!piece.sources) stage_piece(piece);
        together = meet(a.heap, channel, MEETINGS * epoch) && work(piece, epoch);
    }
    end_epoch(a.heap, epoch);
}

// Every rank reads all of everybody's data.
template <class T, class Op> GC_DEV void one_shot(const ShotsArguments& a) {
    const u32 channel = take_channel(a.heap);
    const auto mine = [&](const Piece& piece) { return part_of<T>({0, piece.count}, gridDim.x, channel); };
    for_pieces<T>(a, channel, [&](const Piece& piece) { stage<T>(a, piece, mine(piece)); },
                  [&](const Piece& piece, u64 epoch) {
                      fold_all<T, Op>(a, piece, address_of(a.dst) + piece.start * sizeof(T), mine(piece));
                      return meet(a.heap, channel, MEETINGS * epoch + 2);  // what the others read must stay
                  });
}

template <class T> GC_DEV Range share_of(const ShotsArguments& a, const Piece& piece, u32 rank, u32 channel) {
    return part_of<T>(part_of<T>({0, piece.count}, a.heap.ranks, rank), gridDim.x, channel);
}

template <class T> GC_DEV void collect(const ShotsArguments& a, const Piece& piece, u32 channel) {
    for (u32 k = 0; k < a.heap.ranks; ++k) {
        const u32 rank = (a.heap.rank + k) % a.heap.ranks;
        const Range share = share_of<T>(a, piece, rank, channel);
        const u64 src = result_of<T>(a, piece, rank) + share.start * sizeof(T);
        const u64 dst = address_of(a.dst) + (piece.start + share.start) * sizeof(T);
        if (src != dst) copy_range<T>(dst, src, share.count);
    }
}

// Every rank reads its part of everybody's data, and then the others' parts of the result.
template <class T, class Op> GC_DEV void two_shot(const ShotsArguments& a) {
    const u32 channel = take_channel(a.heap), rank = a.heap.rank;
    for_pieces<T>(a, channel,
                  [&](const Piece& piece) {
                      for (u32 k = 0; k < a.heap.ranks; ++k) stage<T>(a, piece, share_of<T>(a, piece, k, channel));
                  },
                  [&](const Piece& piece, u64 epoch) {
                      const Range share = share_of<T>(a, piece, rank, channel);
                      fold_all<T, Op>(a, piece, result_of<T>(a, piece, rank), share);
                      if (!meet(a.heap, channel, MEETINGS * epoch + 2)) return false;
                      collect<T>(a, piece, channel);
                      return meet(a.heap, channel, MEETINGS * epoch + 3);
                  });
}
