// Compression of gradients with error feedback: x plus the previous error is rounded to fewer bits, and the new error
// is kept for the next call.
//
// The sum is formed in the wide type and rounded once. The error of a NaN or an infinity is 0; otherwise the error
// feedback would repeat the NaN in every later call.
#include "device/functions.h"
#include "device/number.h"
#include "device/walk.h"

// x - x is 0 for every finite x, and NaN otherwise.
template <class W> GC_DEV W finite_or_zero(W x) { return x - x == W(0) ? x : W(0); }

// Round to the nearest integer, ties to even, for |x| <= 2^22 (float). At 1.5 * 2^23 neighbouring floats differ by 1,
// so the addition rounds. The double uses 1.5 * 2^52.
GC_DEV float whole(float x) { return x + 12582912.0f - 12582912.0f; }
GC_DEV double whole(double x) { return x + 6755399441055744.0 - 6755399441055744.0; }

// The unsigned type of BYTES bytes, for accesses to several narrow elements at once.
template <u32 BYTES> struct Bits;
template <> struct Bits<1> { typedef u8 Type; };
template <> struct Bits<2> { typedef u16 Type; };
template <> struct Bits<4> { typedef u32 Type; };
template <> struct Bits<8> { typedef u64 Type; };
template <> struct Bits<16> { typedef Word Type; };

// Return x + before, rounded to S.
template <class S> GC_DEV Wide<S> sum_of(Wide<S> x, Wide<S> before) {
    S stored;
    down(stored, x + before);
    return up(stored);
}

// Load x and the previous error `lost`, and set `sum` to the sums rounded to S. A null `lost` means no error.
template <class S, class Unit> GC_DEV void add_lost(Wide<S> (&sum)[ITEMS<S, Unit>], u64 x, u64 lost) {
    widen<S>(sum, load<Unit>(x));
    if (lost == 0) return;
    Wide<S> before[ITEMS<S, Unit>];
    widen<S>(before, load<Unit>(lost));
    GC_UNROLL
    for (u32 i = 0; i < ITEMS<S, Unit>; ++i) sum[i] = sum_of<S>(sum[i], before[i]);
}

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

// quantise: integers from -127 to 127, a byte each, and a float scale for each `block` of elements.
//
// The scale is the largest absolute value of the block divided by 127; dequantise multiplies by the scale. A row has
// `share` elements, a multiple of `block`. Elements from `count` on are zero. A row takes `stride` bytes; the scales
// begin at byte `scales` of the row. Each block of threads handles a block of elements, to find the maximum in shared
// memory.

struct QuantiseArguments {
    const void* src;
    const void* before;  // may be null
    void* after;
    void* dst;
    u64 count, share, stride, scales;
    u32 block, rows;
};

// Return the code of `sum`, from -127 to 127. The clamp matters for NaN, for infinity and for a subnormal scale.
template <class W> GC_DEV W whole_of(W sum, W divisor) {
    const W number = whole(sum / divisor);
    return number > 127 ? W(127) : number > -127 ? number : W(-127);
}

template <class S, class Unit> struct Quantised {
    static constexpr u32 N = ITEMS<S, Unit>;
    const QuantiseArguments& a;

    // Load the sums from element `first` on; elements from `count` on are zero.
    GC_DEV void read(Wide<S> (&sum)[N], u64 first) const {
        const u64 x = address_of(a.src), before = address_of(a.before);
        if (first + N <= a.count) {
            add_lost<S, Unit>(sum, x + first * sizeof(S), before == 0 ? 0 : before + first * sizeof(S));
            return;
        }
        typedef typename Bits<sizeof(S)>::Type One;
        for (u32 i = 0; i < N; ++i) {
            Wide<S> one[1] = {Wide<S>(0)};
            if (first + i < a.count)
                add_lost<S, One>(one, x + (first + i) * sizeof(S), before == 0 ? 0 : before + (first + i) * sizeof(S));
            sum[i] = one[0];
        }
    }

    // Store the errors from element `first` on, without writing beyond `count`.
    GC_DEV void write(const Wide<S> (&lost)[N], u64 first) const {
        const u64 after = address_of(a.after);
        if (first + N <= a.count) {
            store<Unit>(after + first * sizeof(S), narrow<S, Unit>(lost));
            return;
        }
        for (u32 i = 0; i < N && first + i < a.count; ++i) {
            S stored;
            down(stored, lost[i]);
            store<S>(after + (first + i) * sizeof(S), stored);
        }
    }

    // Return the largest absolute value of the block of elements at `first`. NaN counts as larger than all numbers.
    GC_DEV Wide<S> largest(u64 first) const {
        GC_SHARED(Wide<S>, most, 512);
        Wide<S> found = 0;
        for (u32 unit = threadIdx.x; unit < a.block / N; unit += blockDim.x) {
            Wide<S> sum[N];
            read(sum, first + u64(unit) * N);
            GC_UNROLL
            for (u32 i = 0; i < N; ++i) found = maximum(found, absolute(sum[i]));
        }
        most[threadIdx.x] = found;
        __syncthreads();
        for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
            if (threadIdx.x < half) most[threadIdx.x] = maximum(most[threadIdx.x], most[threadIdx.x + half]);
            __syncthreads();
        }
        found = most[0];
        // The next call overwrites `most`: wait until all threads have read the result.
        __syncthreads();
        return found;
    }

    // Quantise block `number`: two passes over the elements, for the scale and for the codes.
    GC_DEV void one_block(u64 number) const {
        const u64 first = number * a.block, row = first / a.share, place = first % a.share;
        const u64 to = address_of(a.dst) + row * a.stride;
        const float scale = float(largest(first) / 127);
        const Wide<S> factor = scale, divisor = scale > 0 ? factor : Wide<S>(1);
        if (threadIdx.x == 0) store<float>(to + a.scales + place / a.block * sizeof(float), scale);
        for (u32 unit = threadIdx.x; unit < a.block / N; unit += blockDim.x) {
            Wide<S> sum[N];
            read(sum, first + u64(unit) * N);
            Items<i8, typename Bits<N>::Type> items;
            GC_UNROLL
            for (u32 i = 0; i < N; ++i) {
                const Wide<S> number = whole_of(sum[i], divisor);
                items.item[i] = i8(i32(number));
                sum[i] = finite_or_zero(sum[i] - number * factor);
            }
            store(to + place + u64(unit) * N, items.unit);
            write(sum, first + u64(unit) * N);
        }
    }
};

template <class S, class Unit> GC_DEV void quantise_blocks(const QuantiseArguments& a) {
    const u64 blocks = a.share / a.block * a.rows;
    for (u64 number = blockIdx.x; number < blocks; number += gridDim.x) Quantised<S, Unit>{a}.one_block(number);
}

// The bits of non-negative floats, read as integers, have the order of the values, with NaN above all. Integer maxima
// are vectorised by the compiler.
GC_DEV i32 order_of(float x) { return i32(bits_of(absolute(x))); }
GC_DEV i64 order_of(double x) { return i64(bits_of(absolute(x))); }
GC_DEV float value_of(i32 order) { return float_of(u32(order)); }
GC_DEV double value_of(i64 order) { return double_of(u64(order)); }

// Quantise `count` elements of a block with plain loops.
template <class S>
GC_DEV void quantise_block(const S* src, const S* before, S* __restrict after, i8* __restrict dst, float& scale,
                           u32 count) {
    decltype(order_of(Wide<S>())) most = 0;
    for (u32 i = 0; i < count; ++i) {
        const auto one = order_of(before ? sum_of<S>(up(src[i]), up(before[i])) : up(src[i]));
        most = one > most ? one : most;
    }
    scale = float(value_of(most) / 127);
    const Wide<S> factor = scale, divisor = scale > 0 ? factor : Wide<S>(1);
    for (u32 i = 0; i < count; ++i) {
        const Wide<S> sum = before ? sum_of<S>(up(src[i]), up(before[i])) : up(src[i]), number = whole_of(sum, divisor);
        dst[i] = i8(i32(number));
        down(after[i], finite_or_zero(sum - number * factor));
    }
}

// The plain loop for a grid of a single thread: no shared memory, no barriers.
template <class S> GC_DEV void quantise_all(const QuantiseArguments& a) {
    for (u64 first = 0; first < a.share * a.rows; first += a.block) {
        const u64 row = address_of(a.dst) + first / a.share * a.stride, place = first % a.share;
        const u64 left = first < a.count ? a.count - first : 0, here = left < a.block ? left : a.block;
        i8* const to = (i8*)(row + place);
        quantise_block((const S*)a.src + first, a.before ? (const S*)a.before + first : nullptr, (S*)a.after + first, to,
                       ((float*)(row + a.scales))[place / a.block], u32(here));
        for (u64 i = here; i < a.block; ++i) to[i] = 0;
    }
}

template <class S> GC_DEV void quantise(const QuantiseArguments& a) {
    if (is_alone()) return quantise_all<S>(a);
    // Words need aligned arrays, aligned rows and whole words per block; otherwise each thread handles single
    // elements.
    const u64 addresses = address_of(a.src) | address_of(a.before) | address_of(a.after) | address_of(a.dst) | a.stride;
    typedef typename Bits<sizeof(S)>::Type One;
    if (addresses % sizeof(Word) == 0 && a.block % ITEMS<S, Word> == 0)
        quantise_blocks<S, Word>(a);
    else
        quantise_blocks<S, One>(a);
}

// dequantise: dst = the values of the rows, in order. With several `terms`, dst is the sum of `terms` rows over
// `divisor`.

struct DequantiseArguments {
    const void* src;
    void* dst;
    u64 count, share, stride, scales;
    u32 block, terms, divisor;
};

// Dequantise the elements of a unit of S, from element `first` on. A unit never crosses two blocks, so the unit has a
// single scale per row.
template <class S, class Unit> GC_DEV void dequantise_unit(const DequantiseArguments& a, u64 first) {
    constexpr u32 N = ITEMS<S, Unit>;
    typedef typename Bits<N>::Type Codes;
    const u64 place = first % a.share;
    u64 row = address_of(a.src) + first / a.share * a.stride;
    Wide<S> total[N];
    for (u32 term = 0; term < a.terms; ++term, row += a.stride) {
        Items<i8, Codes> items;
        items.unit = load<Codes>(row + place);
        const Wide<S> factor = load<float>(row + a.scales + place / a.block * sizeof(float));
        GC_UNROLL
        for (u32 i = 0; i < N; ++i) {
            const Wide<S> value = Wide<S>(items.item[i]) * factor;
            total[i] = term == 0 ? value : total[i] + value;
        }
    }
    GC_UNROLL
    for (u32 i = 0; i < N; ++i) total[i] = total[i] / Wide<S>(a.divisor);
    store<Unit>(address_of(a.dst) + first * sizeof(S), narrow<S, Unit>(total));
}

// The plain loop for a grid of a single thread.
template <class S> GC_DEV void dequantise_all(const DequantiseArguments& a) {
    // Few elements at a time: all rows are added to a small array of totals.
    constexpr u32 MOST = 64;
    for (u64 first = 0, here; first < a.count; first += here) {
        const u64 place = first % a.share, rest = a.block - place % a.block, left = a.count - first;
        here = rest < left ? rest : left;
        here = here < MOST ? here : MOST;
        u64 row = address_of(a.src) + first / a.share * a.stride;
        Wide<S> total[MOST];
        for (u32 term = 0; term < a.terms; ++term, row += a.stride) {
            const i8* const codes = (const i8*)(row + place);
            const Wide<S> factor = ((const float*)(row + a.scales))[place / a.block];
            for (u64 i = 0; i < here; ++i) {
                const Wide<S> value = Wide<S>(codes[i]) * factor;
                total[i] = term == 0 ? value : total[i] + value;
            }
        }
        S* const to = (S*)a.dst + first;
        for (u64 i = 0; i < here; ++i) down(to[i], total[i] / Wide<S>(a.divisor));
    }
}

template <class S> GC_DEV void dequantise(const DequantiseArguments& a) {
    if (is_alone()) return dequantise_all<S>(a);
    constexpr u32 N = ITEMS<S, Word>;
    const u64 addresses = address_of(a.src) | address_of(a.dst) | a.stride;
    const u64 words = addresses % sizeof(Word) == 0 && a.block % N == 0 ? a.count / N : 0;
    for_batches<1>(words, [&](const auto& batch) { dequantise_unit<S, Word>(a, batch.first * N); });
    typedef typename Bits<sizeof(S)>::Type One;
    for_batches<1>(a.count - words * N,
                   [&](const auto& batch) { dequantise_unit<S, One>(a, words * N + batch.first); });
}
