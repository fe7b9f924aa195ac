// dst = op(...op(op(sources[0], sources[1]), sources[2])...), formed in the wide type and rounded once.
//
// dst may be one of the sources. All addresses are aligned for the dtype. The exact ops (exact.h) need all sources in
// one launch.
#include "device/exact.h"
#include "device/number.h"
#include "device/walk.h"

constexpr u32 MOST_SOURCES = 64;

struct ReduceArguments {
    const void* sources[MOST_SOURCES];  // the first `source_count` entries are used, at least 2
    void* dst;
    u64 count;
    u32 source_count;
};

// Combine the AT_ONCE units into the totals.
template <class T, class Op, class Unit, u32 AT_ONCE>
GC_DEV void combine(Wide<T> (&total)[AT_ONCE][ITEMS<T, Unit>], const Unit (&units)[AT_ONCE]) {
    GC_UNROLL
    for (u32 i = 0; i < AT_ONCE; ++i) {
        Wide<T> wide[ITEMS<T, Unit>];
        widen<T>(wide, units[i]);
        GC_UNROLL
        for (u32 j = 0; j < ITEMS<T, Unit>; ++j) total[i][j] = Op::of(total[i][j], wide[j]);
    }
}

template <class T, class Op, class Unit, u32 AT_ONCE, class Place>
GC_DEV void reduce_batch(const ReduceArguments& a, const Batch<AT_ONCE>& batch, const Place& place) {
    // Read the first two sources together: twice as many loads are under way. More would cost too many registers.
    Unit units[AT_ONCE], second[AT_ONCE];
    batch.read(units, a.sources[0], place);
    batch.read(second, a.sources[1], place);
    Wide<T> total[AT_ONCE][ITEMS<T, Unit>];
    GC_UNROLL
    for (u32 i = 0; i < AT_ONCE; ++i) widen<T>(total[i], units[i]);
    combine<T, Op>(total, second);
    GC_ROLLED
    for (u32 k = 2; k < a.source_count; ++k) {
        batch.read(units, a.sources[k], place);
        combine<T, Op>(total, units);
    }
    GC_UNROLL
    for (u32 i = 0; i < AT_ONCE; ++i) units[i] = narrow<T, Unit>(total[i]);
    batch.write(a.dst, units, place);
}

template <class T, class Op, class Unit, class Place>
GC_DEV void reduce_units(const ReduceArguments& a, u64 count, const Place& place) {
    // A word of bytes has 16 wide values; four words of totals would not fit the registers.
    constexpr u32 AT_ONCE = sizeof(T) == 1 ? 2 : 4;
    for_batches<AT_ONCE>(count, [&](const auto& batch) { reduce_batch<T, Op, Unit>(a, batch, place); });
}

template <class T, class Op> GC_DEV void reduce_in_order(const ReduceArguments& a) {
    u64 differences = 0;
    for (u32 k = 0; k < a.source_count; ++k) differences |= address_of(a.sources[k]) ^ address_of(a.dst);
    const Layout layout = layout_of<T>(address_of(a.dst), differences, a.count);
    reduce_units<T, Op, Word>(a, layout.words, words_of<T>(layout));
    reduce_units<T, Op, T>(a, layout.edges, edges_of<T>(layout));
}

// The exact sums or means, element by element: a thread may read an element twice.
template <class T, class Op> GC_DEV void reduce_exactly(const ReduceArguments& a) {
    typedef typename Exactly<T>::Real Real;
    for_batches<1>(a.count * (sizeof(T) / sizeof(Real)), [&](const auto& batch) {
        const u64 offset = batch.first * sizeof(Real);
        const auto fetch = [&](u32 k) { return up(load<Real>(address_of(a.sources[k]) + offset)); };
        Real result;
        down(result, exact_of<Real, Op::MEAN>(a.source_count, fetch));
        store<Real>(address_of(a.dst) + offset, result);
    });
}

template <class T, class Op> GC_DEV void reduce(const ReduceArguments& a) {
    if constexpr (IsExact<Op>::value)
        reduce_exactly<T, Op>(a);
    else
        reduce_in_order<T, Op>(a);
}
