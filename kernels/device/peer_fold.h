// targets = op(...op(source(0), source(1))...) by the threads of a team; formed in the wide type and rounded once.
#pragma once

#include "device/peer.h"
#include "device/reduce.cu"

// The operands as functions from numbers to addresses: at least two sources, and the targets. A target may be a source.
template <class Source, class Target> struct Operands {
    u32 sources;
    Source source;
    u32 targets;
    Target target;
};
template <class Source, class Target> Operands(u32, Source, u32, Target) -> Operands<Source, Target>;

// Fold a batch. GROUP sources are read together before the first is used, because each source is the memory of another
// GPU, at the far end of a link. GROUP * AT_ONCE loads are then under way, spread over all ranks, and no rank's memory
// is read by all others at once. The sources are combined in the order of ranks, so the bits are the same everywhere.
template <class T, class Op, class Unit, u32 GROUP, u32 AT_ONCE, class Given, class Place>
GC_DEV void fold_batch(const Given& a, const Batch<AT_ONCE>& batch, const Place& place) {
    Unit units[GROUP][AT_ONCE];
    Wide<T> total[AT_ONCE][ITEMS<T, Unit>];
    GC_UNROLL
    for (u32 k = 0; k < GROUP; ++k) batch.read(units[k], pointer_to(a.source(k)), place);
    GC_UNROLL
    for (u32 i = 0; i < AT_ONCE; ++i) widen<T>(total[i], units[0][i]);
    GC_UNROLL
    for (u32 k = 1; k < GROUP; ++k) combine<T, Op>(total, units[k]);
    GC_ROLLED
    for (u32 first = GROUP; first < a.sources; ++first) {
        batch.read(units[0], pointer_to(a.source(first)), place);
        combine<T, Op>(total, units[0]);
    }
    GC_UNROLL
    for (u32 i = 0; i < AT_ONCE; ++i) units[0][i] = narrow<T, Unit>(total[i]);
    GC_ROLLED
    for (u32 k = 0; k < a.targets; ++k) batch.write(pointer_to(a.target(k)), units[0], place);
}

// The exact sums or means of the sources, element by element; see exact.h.
template <class T, class Op, class Given> GC_DEV void fold_exactly(Team team, const Given& a, u64 count) {
    typedef typename Exactly<T>::Real Real;
    for_team<1>(team, count * (sizeof(T) / sizeof(Real)), [&](const auto& batch) {
        const u64 offset = batch.first * sizeof(Real);
        const auto fetch = [&](u32 k) { return up(load<Real>(a.source(k) + offset)); };
        Real result;
        down(result, exact_of<Real, Op::MEAN>(a.sources, fetch));
        for (u32 k = 0; k < a.targets; ++k) store<Real>(a.target(k) + offset, result);
    });
}

// The compiler needs more registers for later GPUs: for sm_120 the usual number of loads would not fit into 128, nor for
// sm_100 if two sources with elements of 4 bytes are folded.
template <class T, u32 GROUP>
constexpr bool IS_TIGHT = GC_ARCH >= 1200 || (GC_ARCH >= 1000 && sizeof(T) == 4 && GROUP == 2);

// Fold `count` elements of at least GROUP sources.
template <class T, class Op, u32 GROUP, class Given> GC_DEV void fold_in_order(Team team, const Given& a, u64 count) {
    // Loads under way together. The wide values of a word take 4 registers, 8 for elements of 2 bytes, 16 for
    // elements of 1 byte. With more loads some kernels would exceed 128 registers.
    constexpr u32 LOADS = sizeof(T) == 1 ? (GROUP == 2 ? 4 : GROUP) : sizeof(T) > 4 ? 8 : 16;
    constexpr u32 USUAL = sizeof(T) == 2 && GROUP == 2 ? 4 : LOADS / GROUP;
    constexpr u32 AT_ONCE = IS_TIGHT<T, GROUP> && USUAL > 1 ? USUAL / 2 : USUAL;
    u64 differences = 0;
    for (u32 k = 0; k < a.sources; ++k) differences |= a.source(k) ^ a.target(0);
    for (u32 k = 1; k < a.targets; ++k) differences |= a.target(k) ^ a.target(0);
    const Layout layout = layout_of<T>(a.target(0), differences, count);
    const Evenly words = words_of<T>(layout);
    const Edges<T> edges = edges_of<T>(layout);
    for_team<AT_ONCE>(team, layout.words, [&](const auto& batch) { fold_batch<T, Op, Word, GROUP>(a, batch, words); });
    for_team<1>(team, layout.edges, [&](const auto& batch) { fold_batch<T, Op, T, GROUP>(a, batch, edges); });
}

template <class T, class Op, u32 GROUP, class Given> GC_DEV void fold(Team team, const Given& a, u64 count) {
    if constexpr (IsExact<Op>::value)
        fold_exactly<T, Op>(team, a, count);
    else
        fold_in_order<T, Op, GROUP>(team, a, count);
}
