// Gradients in 16 bits with error feedback: x plus the previous error is rounded, and the new error is kept for the next
// call.
#include "device/feedback.h"

// shorten: dst = src + before in the dtype D, after = src + before - dst.

struct ShortenArguments {
    const void* src;
    const void* before;
    void* after;
    void* dst;
    u64 count;
};

// Round `sum` to `stored` and return the error.
template <class S, class D> GC_DEV Wide<S> short_of(D& stored, Wide<S> sum) {
    down(stored, Between<S, D>::of(sum));
    return finite_or_zero(sum - Wide<S>(up(stored)));
}

// Shorten the elements of a unit of S, from element `first` on.
template <class S, class D, class Unit> GC_DEV void shorten_unit(const ShortenArguments& a, u64 first) {
    constexpr u32 N = ITEMS<S, Unit>;
    typedef typename Bits<N * sizeof(D)>::Type Short;
    Wide<S> sum[N];
    add_lost<S, Unit>(sum, address_of(a.src) + first * sizeof(S), address_of(a.before) + first * sizeof(S));
    Items<D, Short> items;
    GC_UNROLL
    for (u32 i = 0; i < N; ++i) sum[i] = short_of<S, D>(items.item[i], sum[i]);
    store<Short>(address_of(a.dst) + first * sizeof(D), items.unit);
    store<Unit>(address_of(a.after) + first * sizeof(S), narrow<S, Unit>(sum));
}

// The plain loop for a grid of a single thread.
template <class S, class D>
GC_DEV void shorten_all(const S* src, const S* before, S* __restrict after, D* __restrict dst, u64 count) {
    for (u64 i = 0; i < count; ++i) down(after[i], short_of<S, D>(dst[i], sum_of<S>(up(src[i]), up(before[i]))));
}

template <class S, class D> GC_DEV void shorten(const ShortenArguments& a) {
    if (is_alone()) return shorten_all((const S*)a.src, (const S*)a.before, (S*)a.after, (D*)a.dst, a.count);
    constexpr u32 N = ITEMS<S, Word>;
    const u64 addresses = address_of(a.src) | address_of(a.before) | address_of(a.after) | address_of(a.dst);
    const u64 words = addresses % sizeof(Word) == 0 ? a.count / N : 0;
    for_batches<1>(words, [&](const auto& batch) { shorten_unit<S, D, Word>(a, batch.first * N); });
    typedef typename Bits<sizeof(S)>::Type One;
    for_batches<1>(a.count - words * N,
                   [&](const auto& batch) { shorten_unit<S, D, One>(a, words * N + batch.first); });
}
