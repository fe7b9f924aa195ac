// All-reduce by reading each other's arrays, which ranks either share already or copy into their slabs first.
//
// Every block meets the others' blocks of its number between the steps, and the elements that it reads of a rank's
// array are those which that rank's block of its number has written. Sums are formed in the order of ranks.
#include "peer_fold.h"

struct ShotsArguments {
    Heap heap;
    const void* src;
    void* dst;
    u64 count;
    u64 sources[MOST_RANKS];  // where each rank's input is read
    u64 results[MOST_RANKS];  // where each rank's part of the result is read
};

constexpr u64 MEETINGS = 4;  // of one operation at most

template <class T> GC_DEV void stage(const ShotsArguments& a, Range range) {
    const u64 own = a.sources[a.heap.rank], src = address_of(a.src);
    if (own != src) copy_range<T>(own + range.start * sizeof(T), src + range.start * sizeof(T), range.count);
}

template <class T, class Op> GC_DEV void fold_all(const ShotsArguments& a, u64 dst, Range range) {
    const u64 offset = range.start * sizeof(T);
    fold<T, Op>(dst + offset, a.heap.ranks, [&](u32 rank) { return a.sources[rank] + offset; }, range.count);
}

// Every rank reads all of everybody's data.
template <class T, class Op> GC_DEV void one_shot(const ShotsArguments& a) {
    const u32 channel = take_channel(a.heap);
    const u64 epoch = epoch_of(a.heap);
    const Range mine = part_of<T>({0, a.count}, gridDim.x, channel);
    stage<T>(a, mine);
    if (meet(a.heap, channel, MEETINGS * epoch)) {
        fold_all<T, Op>(a, address_of(a.dst), mine);
        meet(a.heap, channel, MEETINGS * epoch + 1);  // what the others read must stay
    }
    end_epoch(a.heap, epoch);
}

template <class T> GC_DEV Range share_of(const ShotsArguments& a, u32 rank, u32 channel) {
    return part_of<T>(part_of<T>({0, a.count}, a.heap.ranks, rank), gridDim.x, channel);
}

template <class T> GC_DEV void collect(const ShotsArguments& a, u32 channel) {
    for (u32 k = 0; k < a.heap.ranks; ++k) {
        const u32 rank = (a.heap.rank + k) % a.heap.ranks;
        const Range share = share_of<T>(a, rank, channel);
        const u64 offset = share.start * sizeof(T), src = a.results[rank] + offset, dst = address_of(a.dst) + offset;
        if (src != dst) copy_range<T>(dst, src, share.count);
    }
}

// Every rank reads its part of everybody's data, and then the others' parts of the result.
template <class T, class Op> GC_DEV void two_shot(const ShotsArguments& a) {
    const u32 channel = take_channel(a.heap), rank = a.heap.rank;
    const u64 epoch = epoch_of(a.heap);
    for (u32 k = 0; k < a.heap.ranks; ++k) stage<T>(a, share_of<T>(a, k, channel));
    bool together = meet(a.heap, channel, MEETINGS * epoch);
    if (together) {
        fold_all<T, Op>(a, a.results[rank], share_of<T>(a, rank, channel));
        together = meet(a.heap, channel, MEETINGS * epoch + 1);
    }
    if (together) {
        collect<T>(a, channel);
        meet(a.heap, channel, MEETINGS * epoch + 2);
    }
    end_epoch(a.heap, epoch);
}
