// dst = src in another dtype. Neither dtype is complex.
//
// Floats become integers by truncation; values outside the integer's range give arbitrary results. src and dst do not
// overlap.
#include "device/functions.h"
#include "device/number.h"
#include "device/walk.h"

struct CastArguments {
    const void* src;
    void* dst;
    u64 count;
};

// The elements converted together: as many as fill a word of the narrower dtype. READS and WRITES are the words of this
// group in src and in dst. AT_ONCE groups per thread keep about four loads or stores of words under way.
template <class S, class D> struct Group {
    static constexpr u32 SIZE = sizeof(Word) / (sizeof(S) < sizeof(D) ? sizeof(S) : sizeof(D));
    static constexpr u32 READS = SIZE / ITEMS<S, Word>;
    static constexpr u32 WRITES = SIZE / ITEMS<D, Word>;
    static constexpr u32 MOST = READS > WRITES ? READS : WRITES;
    static constexpr u32 AT_ONCE = MOST < 4 ? 4 / MOST : 1;
};

// Convert group number `group` of a batch. A word of the narrower dtype belongs to several words of the wider dtype.
template <class S, class D, u32 AT_ONCE, u32 READS, u32 WRITES>
GC_DEV void cast_group(Word (&to)[WRITES][AT_ONCE], const Word (&from)[READS][AT_ONCE], u32 group) {
    constexpr u32 PER_READ = ITEMS<S, Word>, PER_WRITE = ITEMS<D, Word>;
    Wide<D> results[WRITES][PER_WRITE];
    GC_UNROLL
    for (u32 i = 0; i < READS; ++i) {
        Wide<S> wide[PER_READ];
        widen<S>(wide, from[i][group]);
        GC_UNROLL
        for (u32 j = 0; j < PER_READ; ++j) {
            const u32 item = i * PER_READ + j;
            results[item / PER_WRITE][item % PER_WRITE] = Between<S, D>::of(wide[j]);
        }
    }
    GC_UNROLL
    for (u32 i = 0; i < WRITES; ++i) to[i][group] = narrow<D, Word>(results[i]);
}

// Convert AT_ONCE groups. Words with the same place in their groups are `READS` (or `WRITES`) words apart in memory.
template <class S, class D, u32 AT_ONCE>
GC_DEV void cast_batch(const CastArguments& a, u64 head, const Batch<AT_ONCE>& batch) {
    typedef Group<S, D> G;
    Word from[G::READS][AT_ONCE], to[G::WRITES][AT_ONCE];
    GC_UNROLL
    for (u32 i = 0; i < G::READS; ++i)
        batch.read(from[i], a.src, Evenly{head * sizeof(S) + i * sizeof(Word), G::READS * sizeof(Word)});
    GC_UNROLL
    for (u32 i = 0; i < AT_ONCE; ++i) cast_group<S, D>(to, from, i);
    GC_UNROLL
    for (u32 i = 0; i < G::WRITES; ++i)
        batch.write(a.dst, to[i], Evenly{head * sizeof(D) + i * sizeof(Word), G::WRITES * sizeof(Word)});
}

// Convert element i outside the groups.
template <class S, class D>
GC_DEV void cast_edge(const CastArguments& a, const Edges<S>& source, const Edges<D>& target, u64 i) {
    D stored;
    down(stored, Between<S, D>::of(up(load<S>(address_of(a.src) + source(i)))));
    store<D>(address_of(a.dst) + target(i), stored);
}

// Return the number of elements before the first group, or `count` if src and dst are never aligned together or
// no group follows.
template <class S, class D> GC_DEV u64 head_of(u64 src, u64 dst, u64 count) {
    const u64 head = (0 - (sizeof(S) < sizeof(D) ? src : dst)) % sizeof(Word) * Group<S, D>::SIZE / sizeof(Word);
    const u64 past = (src + head * sizeof(S)) | (dst + head * sizeof(D));
    return past % sizeof(Word) == 0 && head < count ? head : count;
}

// The plain loop for a grid of a single thread (training on a CPU), vectorised by the compiler.
template <class S, class D> GC_DEV void cast_all(const S* src, D* __restrict dst, u64 count) {
    for (u64 i = 0; i < count; ++i) down(dst[i], Between<S, D>::of(up(src[i])));
}

template <class S, class D> GC_DEV void cast(const CastArguments& a) {
    if (is_alone()) return cast_all((const S*)a.src, (D*)a.dst, a.count);
    const u64 head = head_of<S, D>(address_of(a.src), address_of(a.dst), a.count);
    const u64 groups = (a.count - head) / Group<S, D>::SIZE, grouped = groups * Group<S, D>::SIZE;
    for_batches<Group<S, D>::AT_ONCE>(groups, [&](const auto& batch) { cast_batch<S, D>(a, head, batch); });
    for_batches<1>(a.count - grouped, [&](const auto& batch) {
        cast_edge<S, D>(a, {head, grouped}, {head, grouped}, batch.first);
    });
}
