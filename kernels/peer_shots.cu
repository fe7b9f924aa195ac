// All-reduce by reading each other's arrays: where they lie, if all ranks reach them there, or in sections that are copied
// into the slabs first.
//
// Every block meets the others' blocks of its number between the steps, and the elements that it reads of a rank's
// array are those which that rank's block of its number has written. Sums are formed in the order of ranks.
#include "peer_fold.h"

struct ShotsArguments {
    Heap heap;
    const void* src;
    void* dst;
    u64 count, nan_bytes;  // of the result, where a rank does not come
    u64 source_mark, result_mark;  // not 0 and the same on all ranks: then these are read where they lie
    u64 sources[MOST_RANKS];       // where each rank's input is read
    u64 results[MOST_RANKS];       // where each rank's part of the result is read
};

constexpr u64 MEETINGS = 4;  // over one section at most

// Elements on which all ranks work at a time, and whether input and results are read where they lie. It is shared out
// as if there were `room` of them: what is staged of the next one is for the block that has read what was there.
struct Section {
    u64 start, count, room;
    bool sources, results;
};

GC_DEV Range part_there(const Section& section, Range part) {
    const u64 left = part.start < section.count ? section.count - part.start : 0;
    return {part.start, part.count < left ? part.count : left};
}

GC_DEV u64 staging_of(const Heap& heap, u32 rank) { return heap.slabs[rank] + heap.staging; }

// Where a rank's input, and its part of the result, begin.
template <class T> GC_DEV u64 source_of(const ShotsArguments& a, const Section& section, u32 rank) {
    return section.sources ? a.sources[rank] + section.start * sizeof(T) : staging_of(a.heap, rank);
}
template <class T> GC_DEV u64 result_of(const ShotsArguments& a, const Section& section, u32 rank) {
    return section.results ? a.results[rank] + section.start * sizeof(T) : staging_of(a.heap, rank);
}

template <class T> GC_DEV void stage(const ShotsArguments& a, const Section& section, Range range) {
    const u64 own = staging_of(a.heap, a.heap.rank), src = address_of(a.src) + section.start * sizeof(T);
    copy_range<T>(own + range.start * sizeof(T), src + range.start * sizeof(T), range.count);
}

template <class T, class Op>
GC_DEV void fold_all(const ShotsArguments& a, const Section& section, u64 dst, Range range) {
    const u64 offset = range.start * sizeof(T);
    fold<T, Op>(dst + offset, a.heap.ranks, [&](u32 rank) { return source_of<T>(a, section, rank) + offset; },
                range.count);
}

// Returns whether all ranks are here with the first section, and have agreed on where they read.
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

// Calls stage_section(section) before, and work(section, epoch) when all ranks have staged; `work` returns whether they
// are together to its end, when nobody reads any more.
template <class T, class Stage, class Work>
GC_DEV void for_sections(const ShotsArguments& a, u32 channel, const Stage& stage_section, const Work& work) {
    const u64 most = a.heap.staging_bytes / sizeof(T), first = a.count < most ? a.count : most;
    u64 epoch = epoch_of(a.heap);
    Section section = {0, first, first, false, false};
    bool together = agree(a, channel, epoch, section, stage_section) && work(section, epoch);
    GC_ROLLED
    for (section.start = section.count; together && section.start < a.count; section.start += section.count) {
        const u64 left = a.count - section.start;
        section.count = left < section.room ? left : section.room;
        ++epoch;
        if (!section.sources) stage_section(section);
        together = meet(a.heap, channel, MEETINGS * epoch) && work(section, epoch);
    }
    if (!together) fill_with_nan(address_of(a.dst), a.nan_bytes);
    end_epoch(a.heap, epoch);
}

// Every rank reads all of everybody's data.
template <class T, class Op> GC_DEV void one_shot(const ShotsArguments& a) {
    const u32 channel = take_channel(a.heap);
    const auto mine = [&](const Section& section) {
        return part_there(section, part_of<T>({0, section.room}, gridDim.x, channel));
    };
    const auto stage_section = [&](const Section& section) { stage<T>(a, section, mine(section)); };
    for_sections<T>(a, channel, stage_section, [&](const Section& section, u64 epoch) {
        fold_all<T, Op>(a, section, address_of(a.dst) + section.start * sizeof(T), mine(section));
        return meet(a.heap, channel, MEETINGS * epoch + 2);  // what the others read must stay
    });
}

template <class T> GC_DEV Range share_of(const ShotsArguments& a, const Section& section, u32 rank, u32 channel) {
    return part_there(section, part_of<T>(part_of<T>({0, section.room}, a.heap.ranks, rank), gridDim.x, channel));
}

template <class T> GC_DEV void collect(const ShotsArguments& a, const Section& section, u32 channel) {
    for (u32 k = 0; k < a.heap.ranks; ++k) {
        const u32 rank = (a.heap.rank + k) % a.heap.ranks;
        const Range share = share_of<T>(a, section, rank, channel);
        const u64 src = result_of<T>(a, section, rank) + share.start * sizeof(T);
        const u64 dst = address_of(a.dst) + (section.start + share.start) * sizeof(T);
        if (src != dst) copy_range<T>(dst, src, share.count);
    }
}

// Every rank reads its part of everybody's data, and then the others' parts of the result.
template <class T, class Op> GC_DEV void two_shot(const ShotsArguments& a) {
    const u32 channel = take_channel(a.heap), rank = a.heap.rank;
    const auto stage_section = [&](const Section& section) {
        for (u32 k = 0; k < a.heap.ranks; ++k) stage<T>(a, section, share_of<T>(a, section, k, channel));
    };
    for_sections<T>(a, channel, stage_section, [&](const Section& section, u64 epoch) {
        fold_all<T, Op>(a, section, result_of<T>(a, section, rank), share_of<T>(a, section, rank, channel));
        if (!meet(a.heap, channel, MEETINGS * epoch + 2)) return false;
        collect<T>(a, section, channel);
        return meet(a.heap, channel, MEETINGS * epoch + 3);
    });
}
