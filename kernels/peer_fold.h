// dst = op(...op(source(0), source(1))...) by one block, formed in the wide type and rounded once.
#pragma once

#include "peer.h"
#include "reduce.cu"

template <class T, class Op, class Unit, u32 AT_ONCE, class Place, class Source>
GC_DEV void fold_batch(u64 dst, u32 sources, const Source& source, const Batch<AT_ONCE>& batch, const Place& place) {
    // Two sources are read together, so that twice as many loads are under way: each is another rank's memory, at the
    // far end of a link. They are combined in the order of ranks all the same. An odd one is the last.
    Unit units[AT_ONCE], second[AT_ONCE];
    batch.read(units, pointer_to(source(0)), place);
    batch.read(second, pointer_to(source(1)), place);
    Wide<T> total[AT_ONCE][ITEMS<T, Unit>];
    GC_UNROLL
    for (u32 i = 0; i < AT_ONCE; ++i) widen<T>(total[i], units[i]);
    combine<T, Op>(total, second);
    GC_ROLLED
    for (u32 k = 2; k + 1 < sources; k += 2) {
        batch.read(units, pointer_to(source(k)), place);
        batch.read(second, pointer_to(source(k + 1)), place);
        combine<T, Op>(total, units);
        combine<T, Op>(total, second);
    }
    if (sources % 2 == 1) {
        batch.read(units, pointer_to(source(sources - 1)), place);
        combine<T, Op>(total, units);
    }
    GC_UNROLL
    for (u32 i = 0; i < AT_ONCE; ++i) units[i] = narrow<T, Unit>(total[i]);
    batch.write(pointer_to(dst), units, place);
}

// Of two sources at least; one of them may be dst.
template <class T, class Op, class Source> GC_DEV void fold(u64 dst, u32 sources, const Source& source, u64 count) {
    constexpr u32 AT_ONCE = sizeof(T) == 1 ? 2 : 4;
    u64 differences = 0;
    for (u32 k = 0; k < sources; ++k) differences |= source(k) ^ dst;
    const Layout layout = layout_of<T>(dst, differences, count);
    const Evenly words = words_of<T>(layout);
    const Edges<T> edges = edges_of<T>(layout);
    for_block<AT_ONCE>(layout.words,
                       [&](const auto& batch) { fold_batch<T, Op, Word>(dst, sources, source, batch, words); });
    for_block<AT_ONCE>(layout.edges,
                       [&](const auto& batch) { fold_batch<T, Op, T>(dst, sources, source, batch, edges); });
}
