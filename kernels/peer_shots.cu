// All-reduce by reading each other's arrays: where they lie, if all ranks reach them there, or in sections that are copied
// into the slabs first.
//
// Every block meets the others' blocks of its number between the steps, and the elements that it reads of a rank's
// array are those which that rank's block of its number has written. Sums are formed in the order of ranks. A slab has
// room for two sections: while one is reduced the next is copied, so that a section costs one meeting.
#include "peer_fold.h"

struct ShotsArguments {
    Heap heap;
    const void* src;
    void* dst;
    u64 count, nan_bytes;  // of the result, where a rank does not come
    u64 source_mark, result_mark;  // not 0 and the same on all ranks: then all ranks reach these where they lie
    u64 sources[MOST_RANKS];       // where each rank's input is read
    u64 results[MOST_RANKS];       // where each rank's result is written
};

constexpr u64 MEETINGS = 3;  // over one section at most

// Elements on which all ranks work at a time, and whether all reach inputs and results where they lie. It is shared out
// as if there were `room` of them: what is staged of the next one is for the block that has read what was there.
struct Section {
    u64 start, count, room;
    u32 half;  // of the staging
    bool sources, results;
};

GC_DEV Range part_there(const Section& section, Range part) {
    const u64 left = part.start < section.count ? section.count - part.start : 0;
    return {part.start, part.count < left ? part.count : left};
}
GC_DEV Section next_of(const Section& section, u64 count) {
    const u64 start = section.start + section.count, left = count - start;
    return {start, left < section.room ? left : section.room, section.room, 1 - section.half, section.sources,
            section.results};
}

GC_DEV u64 staging_of(const Heap& heap, const Section& section, u32 rank) {
    return heap.slabs[rank] + heap.staging + section.half * heap.staging_bytes;
}

// Where a rank's input, and its result, begin.
template <class T> GC_DEV u64 source_of(const ShotsArguments& a, const Section& section, u32 rank) {
    return section.sources ? a.sources[rank] + section.start * sizeof(T) : staging_of(a.heap, section, rank);
}
template <class T> GC_DEV u64 result_of(const ShotsArguments& a, const Section& section, u32 rank) {
    return section.results ? a.results[rank] + section.start * sizeof(T) : staging_of(a.heap, section, rank);
}

template <class T> GC_DEV void stage(const ShotsArguments& a, const Section& section, Range range) {
    const u64 own = staging_of(a.heap, section, a.heap.rank), src = address_of(a.src) + section.start * sizeof(T);
    copy_range<T>(whole_block(), own + range.start * sizeof(T), src + range.start * sizeof(T), range.count);
}

// Returns whether all ranks are here with the first section, and have agreed on what they reach.
template <class Stage>
GC_DEV bool agree(const ShotsArguments& a, u32 channel, u64 epoch, Section& section, const Stage& stage_section) {
    tell(a.heap, channel, a.source_mark, a.result_mark);
    if (a.source_mark == 0) stage_section(section);
    if (!meet(a.heap, channel, MEETINGS * epoch)) return false;
    const bool alike = is_alike(a.heap, channel, 0, a.source_mark);
    section.sources = alike && a.source_mark != 0;
    section.results = is_alike(a.heap, channel, 1, a.result_mark) && a.result_mark != 0;
    if (section.sources && section.results) section.count = section.room = a.count;
    if (alike) return true;
    if (a.source_mark != 0) stage_section(section);  // others have not told that it lies where theirs do
    return meet(a.heap, channel, MEETINGS * epoch + 1);
}

// Calls stage_section(section) first, reduce(section) when all ranks have staged it, and collect(section) when all have
// reduced it. The ranks meet once between two sections: then one is reduced everywhere, and the next staged.
template <class T, class Stage, class Reduce, class Collect>
GC_DEV void for_sections(const ShotsArguments& a, u32 channel, const Stage& stage_section, const Reduce& reduce,
                         const Collect& collect) {
    const u64 most = a.heap.staging_bytes / sizeof(T), first = a.count < most ? a.count : most;
    u64 epoch = epoch_of(a.heap);
    Section section = {0, first, first, 0, false, false};
    bool together = agree(a, channel, epoch, section, stage_section);
    GC_ROLLED
    while (together) {
        reduce(section);
        const Section next = next_of(section, a.count);
        if (!section.sources) stage_section(next);
        together = meet(a.heap, channel, MEETINGS * epoch + 2);
        if (together) collect(section);
        __syncthreads();  // the section after the next is staged where this one was, by other threads
        if (next.count == 0) break;
        section = next;
        ++epoch;
    }
    if (!together) {
        leave(a.heap, channel);
        fill_with_nan(address_of(a.dst), a.nan_bytes);
    }
    end_epoch(a.heap, epoch);
}

template <class T, class Op, class Given> GC_DEV void fold_all(const ShotsArguments& a, const Given& operands, u64 count) {
    if (a.heap.ranks < 4)
        fold<T, Op, 2>(whole_block(), operands, count);
    else if (a.heap.ranks < 8)
        fold<T, Op, 4>(whole_block(), operands, count);
    else
        fold<T, Op, 8>(whole_block(), operands, count);
}

// Every rank reads all of everybody's data.
template <class T, class Op> GC_DEV void fold_all(const ShotsArguments& a) {
    const u32 channel = take_channel(a.heap);
    const auto mine = [&](const Section& section) {
        return part_there(section, part_of<T>({0, section.room}, gridDim.x, channel));
    };
    const auto reduce = [&](const Section& section) {
        const Range range = mine(section);
        const u64 offset = range.start * sizeof(T), dst = address_of(a.dst) + section.start * sizeof(T) + offset;
        const auto source = [&](u32 rank) { return source_of<T>(a, section, rank) + offset; };
        fold_all<T, Op>(a, Operands{a.heap.ranks, source, 1, [&](u32) { return dst; }}, range.count);
    };
    for_sections<T>(a, channel, [&](const Section& section) { stage<T>(a, section, mine(section)); }, reduce,
                    [](const Section&) {});
}

template <class T> GC_DEV Range share_of(const ShotsArguments& a, const Section& section, u32 rank, u32 channel) {
    return part_there(section, part_of<T>(part_of<T>({0, section.room}, a.heap.ranks, rank), gridDim.x, channel));
}

// Every rank reads its share of everybody's data, and writes the result to everybody as it is formed, so that both
// directions of a link are busy. What it overwrites, in place or in the staging, no other rank reads.
template <class T, class Op> GC_DEV void fold_share(const ShotsArguments& a) {
    const u32 channel = take_channel(a.heap), ranks = a.heap.ranks;
    const auto for_shares = [&](const Section& section, const auto& job) {
        for (u32 k = 0; k < ranks; ++k) job(share_of<T>(a, section, k, channel));
    };
    const auto stage_section = [&](const Section& section) {
        for_shares(section, [&](Range share) { stage<T>(a, section, share); });
    };
    const auto reduce = [&](const Section& section) {
        const Range share = share_of<T>(a, section, a.heap.rank, channel);
        const u64 offset = share.start * sizeof(T);
        const auto source = [&](u32 rank) { return source_of<T>(a, section, rank) + offset; };
        const auto target = [&](u32 k) {  // not the same one first on all ranks
            return result_of<T>(a, section, (a.heap.rank + k) % ranks) + offset;
        };
        fold_all<T, Op>(a, Operands{ranks, source, ranks, target}, share.count);
    };
    const auto collect = [&](const Section& section) {
        const u64 src = staging_of(a.heap, section, a.heap.rank), dst = address_of(a.dst) + section.start * sizeof(T);
        if (section.results) return;
        for_shares(section, [&](Range share) {
            const u64 offset = share.start * sizeof(T);
            copy_range<T>(whole_block(), dst + offset, src + offset, share.count);
        });
    };
    for_sections<T>(a, channel, stage_section, reduce, collect);
}
