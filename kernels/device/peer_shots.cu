// All-reduce by reading the other ranks' arrays: directly if all ranks can access all arrays, otherwise in sections
// copied into the slabs first.
//
// Every block meets the same block of all ranks between the steps. The elements read by a block from another rank were
// written by the block of the same number there, so the meeting orders the accesses. Sums are formed in the order of
// ranks. A slab has room for two sections: the next section is copied while the current section is reduced, so each
// section costs a single meeting.
#include "device/peer_fold.h"

struct ShotsArguments {
    Heap heap;
    const void* src;
    void* dst;
    u64 count, nan_bytes;  // bytes of the result set to NaN if a rank is missing
    u64 source_mark, result_mark;  // identify slab and offset; nonzero and equal on all ranks: direct access
    u64 sources[MOST_RANKS];       // addresses of the ranks' inputs, for reading
    u64 results[MOST_RANKS];       // addresses of the ranks' results, for writing
    u64 staged;     // this rank's staging area: in the slab, or in the memory of `multicast`
    u64 multicast;  // the staging areas of all ranks at once, see multimem.h; 0 without such memory
    // The memory of the inputs, and of the results, of all ranks at once, and the arrays' offsets there; 0 without.
    u64 source_group, result_group, source_place, result_place;
};

// The elements handled by all ranks at a time, and whether inputs and results are accessed directly. The elements are
// always divided as if there were `room` of them, even in a shorter last section. Then a block stages the next section
// only over elements read by the same block of the other ranks.
struct Section {
    u64 start, count, room;
    u32 half;  // the half of the staging area in use, 0 or 1
    bool sources, results;
};

// Return the elements of `part` that exist in the section.
GC_DEV Range part_there(const Section& section, Range part) {
    const u64 left = part.start < section.count ? section.count - part.start : 0;
    return {part.start, part.count < left ? part.count : left};
}
// Return the next section, staged in the other half.
GC_DEV Section next_of(const Section& section, u64 count) {
    const u64 start = section.start + section.count, left = count - start;
    return {start, left < section.room ? left : section.room, section.room, 1 - section.half, section.sources,
            section.results};
}

GC_DEV u64 staging_of(const Heap& heap, const Section& section, u32 rank) {
    return heap.slabs[rank] + heap.staging + section.half * heap.staging_bytes;
}
GC_DEV u64 own_staging(const ShotsArguments& a, const Section& section) {
    return a.staged + section.half * a.heap.staging_bytes;
}

// Return the address of a rank's input, or result, for this section.
template <class T> GC_DEV u64 source_of(const ShotsArguments& a, const Section& section, u32 rank) {
    return section.sources ? a.sources[rank] + section.start * sizeof(T) : staging_of(a.heap, section, rank);
}
template <class T> GC_DEV u64 result_of(const ShotsArguments& a, const Section& section, u32 rank) {
    return section.results ? a.results[rank] + section.start * sizeof(T) : staging_of(a.heap, section, rank);
}

// Copy elements of this rank's input into this rank's staging area.
template <class T> GC_DEV void stage(const ShotsArguments& a, const Section& section, Range range) {
    const u64 own = own_staging(a, section), src = address_of(a.src) + section.start * sizeof(T);
    copy_range<T>(whole_block(), own + range.start * sizeof(T), src + range.start * sizeof(T), range.count);
}

// Meet all ranks with the first section, and decide about direct access. Return false if a rank is missing.
template <class Stage>
GC_DEV bool agree(const ShotsArguments& a, u32 channel, u64 epoch, Section& section, const Stage& stage_section) {
    send_values(a.heap, channel, a.source_mark, a.result_mark);
    if (a.source_mark == 0) stage_section(section);
    if (!meet(a.heap, channel, MEETINGS * epoch)) return false;
    bool alike = is_alike(a.heap, channel, 0, a.source_mark);
    section.sources = alike && a.source_mark != 0;
    section.results = is_alike(a.heap, channel, 1, a.result_mark) && a.result_mark != 0;
    // Multicast memory holds the inputs and the results of a section, or neither.
    if (a.multicast != 0 && section.sources != section.results) {
        alike = alike && a.source_mark == 0;
        section.sources = section.results = false;
    }
    if (section.sources && section.results) section.count = section.room = a.count;
    if (alike) return true;
    if (a.source_mark != 0) stage_section(section);  // some other rank's mark differs: stage after all
    return meet(a.heap, channel, MEETINGS * epoch + 1);
}

// Call, for each section of at most `most` elements, stage_section, then reduce once all ranks have staged, then collect
// once all ranks have reduced. A single meeting between two sections serves two purposes: the current section is reduced
// on all ranks, and the next section is staged.
template <class T, class Stage, class Reduce, class Collect>
GC_DEV void for_sections(const ShotsArguments& a, u32 channel, u64 most, const Stage& stage_section,
                         const Reduce& reduce, const Collect& collect) {
    const u64 first = a.count < most ? a.count : most;
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
        __syncthreads();  // the section after the next would else overwrite this half, which slow threads still copy
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

// GROUP, the number of sources read together, is a template argument: the units are held in registers.
template <class T, class Op, class Given> GC_DEV void fold_all(const ShotsArguments& a, const Given& operands, u64 count) {
    if constexpr (IsExact<Op>::value)
        fold_exactly<T, Op>(whole_block(), operands, count);
    else if (a.heap.ranks < 4)
        fold<T, Op, 2>(whole_block(), operands, count);
    else if (a.heap.ranks < 8)
        fold<T, Op, 4>(whole_block(), operands, count);
    else
        fold<T, Op, 8>(whole_block(), operands, count);
}

// One-shot all-reduce: every rank reads all data of all ranks.
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
    const auto stage_section = [&](const Section& section) { stage<T>(a, section, mine(section)); };
    for_sections<T>(a, channel, a.heap.staging_bytes / sizeof(T), stage_section, reduce,
                    [](const Section&) {});
}

// Return block `channel`'s part of the elements of the section reduced by `rank`.
template <class T> GC_DEV Range share_of(const ShotsArguments& a, const Section& section, u32 rank, u32 channel) {
    return part_there(section, part_of<T>(part_of<T>({0, section.room}, a.heap.ranks, rank), gridDim.x, channel));
}

// All-reduce by shares: every rank calls reduce_share(section, elements) for its share of the data, which reduces the
// elements and writes the results to all ranks at once. So both directions of a link are busy. The elements
// overwritten, in place or in the staging area, are read by no other rank. `between` is called between the accesses of
// reduce_share and all other accesses, by this rank or another one, to the memory that reduce_share accesses.
template <class T, class ReduceShare, class Between>
GC_DEV void by_shares(const ShotsArguments& a, const ReduceShare& reduce_share, const Between& between) {
    const u32 channel = take_channel(a.heap), ranks = a.heap.ranks;
    const auto for_shares = [&](const Section& section, const auto& job) {
        for (u32 k = 0; k < ranks; ++k) job(share_of<T>(a, section, k, channel));
    };
    const auto stage_section = [&](const Section& section) {
        for_shares(section, [&](Range share) { stage<T>(a, section, share); });
        between();
    };
    const auto reduce = [&](const Section& section) {
        between();
        reduce_share(section, share_of<T>(a, section, a.heap.rank, channel));
        between();
    };
    const auto collect = [&](const Section& section) {
        const u64 src = own_staging(a, section), dst = address_of(a.dst) + section.start * sizeof(T);
        between();
        if (section.results) return;
        for_shares(section, [&](Range share) {
            const u64 offset = share.start * sizeof(T);
            copy_range<T>(whole_block(), dst + offset, src + offset, share.count);
        });
    };
    between();  // earlier kernels have written arrays that are accessed directly
    for_sections<T>(a, channel, a.heap.staging_bytes / sizeof(T), stage_section, reduce, collect);
}

// Read the inputs of a share from all ranks, and write the results to all ranks.
template <class T, class Op> GC_DEV void fold_share(const ShotsArguments& a, const Section& section, Range share) {
    const u64 offset = share.start * sizeof(T);
    const u32 ranks = a.heap.ranks;
    const auto source = [&](u32 rank) { return source_of<T>(a, section, rank) + offset; };
    // Start with this rank: otherwise all ranks would write to rank 0 first.
    const auto target = [&](u32 k) { return result_of<T>(a, section, (a.heap.rank + k) % ranks) + offset; };
    fold_all<T, Op>(a, Operands{ranks, source, ranks, target}, share.count);
}

// Two-shot all-reduce.
template <class T, class Op> GC_DEV void fold_share(const ShotsArguments& a) {
    by_shares<T>(a, [&](const Section& section, Range share) { fold_share<T, Op>(a, section, share); }, [] {});
}
