// All-reduce and all-gather through multicast memory. An all-reduce of arrays at the same place in multicast memory of all
// ranks works on these arrays; other arrays are copied into the staging area first, in sections.
//
// One reducing load replaces a load from every rank, and one store replaces a store to every rank. In an all-reduce a GPU
// sends and receives 1 + 1 / ranks times the array, instead of 2 (ranks - 1) / ranks times; in an all-gather a GPU sends
// its block once. Meetings and sections are those of peer_shots.cu.
#include "device/multimem.h"
#include "device/peer_shots.cu"

// Call job(offset) for the words of a range of bytes; the last word may extend beyond the range.
template <class Job> GC_DEV void for_words(u64 start, u64 nbytes, const Job& job) {
    for_team<4>(whole_block(), (nbytes + sizeof(Word) - 1) / sizeof(Word),
                [&](const auto& batch) { job(batch, Evenly{start, sizeof(Word)}); });
}

// Reduce words of all ranks at `source` to words of all ranks at `target`, `further` bytes behind in its memory.
template <class T, class Op, u32 COUNT>
GC_DEV void reduce_batch(u64 source, u64 target, u64 further, const Batch<COUNT>& batch, const Evenly& place) {
    Word words[COUNT];
    GC_UNROLL
    for (u32 i = 0; i < COUNT; ++i) words[i] = multimem_load<T, Op>(source, place(batch.first + i * batch.apart));
    GC_UNROLL
    for (u32 i = 0; i < COUNT; ++i)
        multimem_store(target, place(batch.first + i * batch.apart) + further, words[i]);
}

// Every rank reduces its share and writes the result to all ranks. A single rank forms an element, so all ranks get the
// same bits, although the order of summation is unknown. Only whole words go through the switch: of an array, the rest
// is loaded from every rank, as the bytes behind it belong to another array.
template <class T, class Op> GC_DEV void multimem_share(const ShotsArguments& a) {
    const bool switched = a.source_group != 0 && a.result_group != 0
        && (a.source_place | a.result_place) % sizeof(Word) == 0;
    const auto reduce_share = [&](const Section& section, Range share) {
        u64 begin = section.half * a.heap.staging_bytes, source = a.multicast, target = source, further = 0;
        u64 nbytes = share.count * sizeof(T);
        if (section.sources) {
            begin = a.source_place, source = a.source_group, target = a.result_group;
            further = a.result_place - a.source_place;
            nbytes = switched ? nbytes & ~u64(sizeof(Word) - 1) : 0;
            const u64 done = nbytes / sizeof(T);
            fold_share<T, Op>(a, section, {share.start + done, share.count - done});
        }
        for_words(begin + share.start * sizeof(T), nbytes, [&](const auto& batch, const Evenly& place) {
            reduce_batch<T, Op>(source, target, further, batch, place);
        });
    };
    by_shares<T>(a, reduce_share, [] { alias_fence(); });
}

template <u32 COUNT>
GC_DEV void spread_batch(u64 group, u64 own, const Batch<COUNT>& batch, const Evenly& place) {
    Word words[COUNT];
    batch.read(words, pointer_to(own), place);
    GC_UNROLL
    for (u32 i = 0; i < COUNT; ++i) multimem_store(group, place(batch.first + i * batch.apart), words[i]);
}

// All-gather: every rank writes its block to all ranks. `count` is the number of units of a block; the blocks of the
// ranks lie one after the other in a section. In its own block a rank writes what is there already.
template <class Unit> GC_DEV void multimem_gather(const ShotsArguments& a) {
    const u32 channel = take_channel(a.heap), ranks = a.heap.ranks;
    // A section has 1 / ranks of the staging area for each block, in whole words.
    const u64 room = a.heap.staging_bytes / ranks & ~u64(sizeof(Word) - 1);
    const auto mine = [&](const Section& section) {
        return part_there(section, part_of<Unit>({0, section.room}, gridDim.x, channel));
    };
    const auto stage_section = [&](const Section& section) {
        const Range part = mine(section);
        const u64 src = address_of(a.src) + (section.start + part.start) * sizeof(Unit);
        const u64 own = own_staging(a, section) + a.heap.rank * room + part.start * sizeof(Unit);
        copy_range<Unit>(whole_block(), own, src, part.count);
    };
    const auto spread = [&](const Section& section) {
        const Range part = mine(section);
        const u64 half = section.half * a.heap.staging_bytes;
        for_words(half + a.heap.rank * room + part.start * sizeof(Unit), part.count * sizeof(Unit),
                  [&](const auto& batch, const Evenly& place) { spread_batch(a.multicast, a.staged, batch, place); });
        alias_fence();
    };
    const auto collect = [&](const Section& section) {
        alias_fence();
        const Range part = mine(section);
        for (u32 k = 0; k < ranks; ++k) {
            const u64 src = own_staging(a, section) + k * room + part.start * sizeof(Unit);
            const u64 dst = address_of(a.dst) + (k * a.count + section.start + part.start) * sizeof(Unit);
            copy_range<Unit>(whole_block(), dst, src, part.count);
        }
    };
    for_sections<Unit>(a, channel, room / sizeof(Unit), stage_section, spread, collect);
}
