// quantise: elements and scales of a block-scaled format (blocks.h), with error feedback. dequantise: the values, or the
// sum of several rows over a divisor. maxima: the largest magnitudes, for the second scale of nvfp4.
//
// A row has `share` elements, a multiple of `block`: the elements, from byte `scales` on the scales of the blocks, and
// from byte `tail` on the scale of the row, in nvfp4. A row takes `stride` bytes. Elements from `count` on are zero.
#include "device/blocks.h"
#include "device/feedback.h"

struct QuantiseArguments {
    const void* src;
    const void* before;  // may be null
    void* after;         // may be null
    void* dst;
    const void* maxima;  // the largest magnitude of each row, in the wide type; null for formats without row scales
    u64 count, share, stride, scales, tail;
    u32 block, rows;
};

template <class S, class F> GC_DEV float row_scale(const QuantiseArguments& a, u64 row) {
    return a.maxima == nullptr ? 1.0f : F::row(((const Wide<S>*)a.maxima)[row]);
}

// Return the largest of all threads' values, to all threads of the block.
template <class W> GC_DEV W largest_of_threads(W found) {
    GC_SHARED(W, most, 512);
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

// The elements of a thread: N of them, one word, or the least number that fills bytes of the result.
template <class S, class F, bool WORDS> struct ThreadElements {
    static constexpr u32 N = WORDS ? ITEMS<S, Word> : F::PER_BYTE;
    typedef typename Bits<N / F::PER_BYTE>::Type Codes;
    typedef typename Bits<sizeof(S)>::Type One;
    const QuantiseArguments& a;

    // Load the sums from element `first` on; elements from `count` on are zero.
    GC_DEV void read(Wide<S> (&sum)[N], u64 first) const {
        const u64 x = address_of(a.src) + first * sizeof(S);
        const u64 before = a.before == nullptr ? 0 : address_of(a.before) + first * sizeof(S);
        if constexpr (WORDS) {
            if (first + N <= a.count) {
                add_lost<S, Word>(sum, x, before);
                return;
            }
        }
        for (u32 i = 0; i < N; ++i) {
            Wide<S> one[1] = {Wide<S>(0)};
            if (first + i < a.count) add_lost<S, One>(one, x + i * sizeof(S), before == 0 ? 0 : before + i * sizeof(S));
            sum[i] = one[0];
        }
    }

    // Store the errors from element `first` on, without writing beyond `count`.
    GC_DEV void write(const Wide<S> (&lost)[N], u64 first) const {
        if (a.after == nullptr) return;
        const u64 after = address_of(a.after) + first * sizeof(S);
        if constexpr (WORDS) {
            if (first + N <= a.count) {
                store<Word>(after, narrow<S, Word>(lost));
                return;
            }
        }
        for (u32 i = 0; i < N && first + i < a.count; ++i) {
            S stored;
            down(stored, lost[i]);
            store<S>(after + i * sizeof(S), stored);
        }
    }

    // Store the codes of the sums, and the errors.
    GC_DEV void encode(Wide<S> (&sum)[N], u64 first, Wide<S> factor) const {
        const Wide<S> divisor = divisor_of(factor);
        Items<u8, Codes> items;
        items.unit = Codes();
        GC_UNROLL
        for (u32 i = 0; i < N; ++i) {
            const u8 code = element_of<F>(sum[i], divisor);
            items.item[i / F::PER_BYTE] |= u8(code << i % F::PER_BYTE * 4);
            sum[i] = finite_or_zero(sum[i] - Wide<S>(F::value(code)) * factor);
        }
        store(address_of(a.dst) + first / a.share * a.stride + first % a.share / F::PER_BYTE, items.unit);
        write(sum, first);
    }

    // Store the scale of the block of elements at `first`, given its largest magnitude; return the scale's value.
    GC_DEV Wide<S> scaled(Wide<S> most, u64 first, bool stores) const {
        const u64 row = first / a.share, place = first % a.share, to = address_of(a.dst) + row * a.stride;
        const float of_row = row_scale<S, F>(a, row);
        const typename F::Scale scale = F::scale(most, of_row);
        if (stores) {
            store<typename F::Scale>(to + a.scales + place / a.block * sizeof(scale), scale);
            if (a.maxima != nullptr && place == 0) store<float>(to + a.tail, of_row);
        }
        return F::factor(scale, of_row);
    }

    // Return the largest magnitude of the block of elements at `first`. NaN counts as larger than all numbers.
    GC_DEV Wide<S> largest(u64 first) const {
        Wide<S> found = 0;
        for (u32 part = threadIdx.x; part < a.block / N; part += blockDim.x) {
            Wide<S> sum[N];
            read(sum, first + u64(part) * N);
            GC_UNROLL
            for (u32 i = 0; i < N; ++i) found = maximum(found, absolute(sum[i]));
        }
        return largest_of_threads(found);
    }

    // Quantise block `number` of elements by all threads: two passes over the elements, for the scale and the codes.
    GC_DEV void by_all(u64 number) const {
        const u64 first = number * a.block;
        const Wide<S> factor = scaled(largest(first), first, threadIdx.x == 0);
        for (u32 part = threadIdx.x; part < a.block / N; part += blockDim.x) {
            Wide<S> sum[N];
            read(sum, first + u64(part) * N);
            encode(sum, first + u64(part) * N, factor);
        }
    }

    // Quantise the elements from `start` on, N for each thread, in short blocks of elements: GROUP threads find the
    // largest magnitude of their block together, and keep the elements in registers.
    GC_DEV void by_groups(u64 start) const {
        constexpr u32 GROUP = F::BLOCK / N;
        GC_SHARED(Wide<S>, most, 512);
        const u64 first = start + u64(threadIdx.x) * N;
        const bool is_inside = first < a.share * a.rows;
        Wide<S> sum[N], found = 0;
        if (is_inside) {
            read(sum, first);
            GC_UNROLL
            for (u32 i = 0; i < N; ++i) found = maximum(found, absolute(sum[i]));
        }
        most[threadIdx.x] = found;
        __syncthreads();
        const u32 leader = threadIdx.x / GROUP * GROUP;
        found = most[leader];
        GC_UNROLL
        for (u32 k = 1; k < GROUP; ++k) found = maximum(found, most[leader + k]);
        // The next call overwrites `most`: wait until all threads have read their results.
        __syncthreads();
        if (is_inside) encode(sum, first, scaled(found, first, threadIdx.x == leader));
    }

    GC_DEV void all() const {
        const u64 elements = a.share * a.rows;
        if constexpr (F::BLOCK == 0) {
            for (u64 number = blockIdx.x; number < elements / a.block; number += gridDim.x) by_all(number);
        } else {
            const u64 tile = u64(blockDim.x) * N;
            for (u64 start = blockIdx.x * tile; start < elements; start += gridDim.x * tile) by_groups(start);
        }
    }
};

// The bits of non-negative floats, read as integers, have the order of the values, with NaN above all. Integer maxima
// are vectorised by the compiler.
GC_DEV i32 order_of(float x) { return i32(bits_of(absolute(x))); }
GC_DEV i64 order_of(double x) { return i64(bits_of(absolute(x))); }
GC_DEV float value_of(i32 order) { return float_of(u32(order)); }
GC_DEV double value_of(i64 order) { return double_of(u64(order)); }

// Return the largest magnitude of `count` sums, by a plain loop.
template <class S> GC_DEV Wide<S> largest_of(const S* src, const S* before, u64 count) {
    decltype(order_of(Wide<S>())) most = 0;
    for (u64 i = 0; i < count; ++i) {
        const auto one = order_of(before ? sum_of<S>(up(src[i]), up(before[i])) : up(src[i]));
        most = one > most ? one : most;
    }
    return value_of(most);
}

// Write the codes, a byte each, and the errors of `count` sums, by a plain loop.
template <class S, class F>
GC_DEV void encode_all(const S* src, const S* before, S* __restrict after, u8* __restrict codes, Wide<S> factor,
                       u64 count) {
    const Wide<S> divisor = divisor_of(factor);
    for (u64 i = 0; i < count; ++i) {
        const Wide<S> sum = before ? sum_of<S>(up(src[i]), up(before[i])) : up(src[i]);
        const u8 code = element_of<F>(sum, divisor);
        codes[i] = code;
        if (after != nullptr) down(after[i], finite_or_zero(sum - Wide<S>(F::value(code)) * factor));
    }
}

// One row by plain loops, for a grid of a single thread: no shared memory, no barriers.
template <class S, class F> struct Row {
    const QuantiseArguments& a;
    u8* to;        // the row
    float of_row;  // its scale

    // Quantise `here` elements, the beginning of the block `number` of the row. Calls with a constant become loops
    // without a remainder.
    GC_DEV void block(u64 number, const S* src, const S* before, S* after, u64 here) const {
        const typename F::Scale scale = F::scale(largest_of(src, before, here), of_row);
        ((typename F::Scale*)(to + a.scales))[number] = scale;
        const Wide<S> factor = F::factor(scale, of_row);
        u8* const place = to + number * a.block / F::PER_BYTE;
        if constexpr (F::PER_BYTE == 1) {
            encode_all<S, F>(src, before, after, place, factor, here);
            for (u64 i = here; i < a.block; ++i) place[i] = 0;
        } else {
            u8 codes[F::BLOCK] = {};
            encode_all<S, F>(src, before, after, codes, factor, here);
            for (u32 i = 0; i < F::BLOCK / 2; ++i) place[i] = u8(codes[2 * i] | codes[2 * i + 1] << 4);
        }
    }

    GC_DEV void all(u64 first) const {
        for (u64 number = 0; number < a.share / a.block; ++number, first += a.block) {
            const S* const src = (const S*)a.src + first;
            const S* const before = (const S*)a.before + first;
            S* const after = a.after != nullptr ? (S*)a.after + first : nullptr;
            const u64 left = first < a.count ? a.count - first : 0;
            if (F::BLOCK != 0 && left >= F::BLOCK) {
                // Two calls, so that the loops do not ask for each element whether there is an addend.
                if (a.before != nullptr)
                    block(number, src, before, after, F::BLOCK);
                else
                    block(number, src, nullptr, after, F::BLOCK);
            } else {
                block(number, src, a.before != nullptr ? before : nullptr, after, left < a.block ? left : a.block);
            }
        }
    }
};

template <class S, class F> GC_DEV void quantise_alone(const QuantiseArguments& a) {
    for (u64 row = 0; row < a.rows; ++row) {
        u8* const to = (u8*)a.dst + row * a.stride;
        const float of_row = row_scale<S, F>(a, row);
        if (a.maxima != nullptr) *(float*)(to + a.tail) = of_row;
        Row<S, F>{a, to, of_row}.all(row * a.share);
    }
}

template <class S, class F> GC_DEV void quantise(const QuantiseArguments& a) {
    if (is_alone()) return quantise_alone<S, F>(a);
    // Words need aligned arrays, aligned rows and whole words per block.
    const u64 addresses = address_of(a.src) | address_of(a.before) | address_of(a.after) | address_of(a.dst) | a.stride;
    if (addresses % sizeof(Word) == 0 && a.block % ITEMS<S, Word> == 0)
        ThreadElements<S, F, true>{a}.all();
    else
        ThreadElements<S, F, false>{a}.all();
}

struct DequantiseArguments {
    const void* src;
    void* dst;
    u64 count, share, stride, scales, tail;
    u32 block, terms, divisor, has_row_scales;
};

constexpr u32 CHUNK = 64;  // elements for which a loop on a CPU adds all rows, in a small array of totals

// Return the value of the scale that the element at `place` of a row has.
template <class F> GC_DEV float factor_of(const DequantiseArguments& a, u64 row, u64 place) {
    const float of_row = a.has_row_scales ? load<float>(row + a.tail) : 1.0f;
    return F::factor(load<typename F::Scale>(row + a.scales + place / a.block * sizeof(typename F::Scale)), of_row);
}

// Dequantise N elements from `first` on: a word, or the elements of a byte. They never cross two blocks, so they have a
// single scale per row. With several `terms`, the result is the sum of `terms` rows over `divisor`.
template <class S, class F, bool WORDS> GC_DEV void dequantise_part(const DequantiseArguments& a, u64 first) {
    constexpr u32 N = WORDS ? ITEMS<S, Word> : F::PER_BYTE;
    typedef typename Bits<N / F::PER_BYTE>::Type Codes;
    const u64 place = first % a.share;
    u64 row = address_of(a.src) + first / a.share * a.stride;
    Wide<S> total[N];
    for (u32 term = 0; term < a.terms; ++term, row += a.stride) {
        Items<u8, Codes> items;
        items.unit = load<Codes>(row + place / F::PER_BYTE);
        const Wide<S> factor = factor_of<F>(a, row, place);
        GC_UNROLL
        for (u32 i = 0; i < N; ++i) {
            const u8 code = F::PER_BYTE == 1 ? items.item[i] : items.item[i / 2] >> i % 2 * 4 & 15;
            const Wide<S> value = Wide<S>(F::value(code)) * factor;
            total[i] = term == 0 ? value : total[i] + value;
        }
    }
    GC_UNROLL
    for (u32 i = 0; i < N; ++i) total[i] = total[i] / Wide<S>(a.divisor);
    const u64 to = address_of(a.dst) + first * sizeof(S);
    if constexpr (WORDS) {
        store<Word>(to, narrow<S, Word>(total));
    } else {
        for (u32 i = 0; i < N && first + i < a.count; ++i) {
            S stored;
            down(stored, total[i]);
            store<S>(to + i * sizeof(S), stored);
        }
    }
}

// Add the values of `count` codes of a row to the totals, or let the totals begin with them, by plain loops.
template <class F, class W> GC_DEV void add_values(W* total, const u8* codes, W factor, bool begins, u32 count) {
    u8 apart[CHUNK];
    if constexpr (F::PER_BYTE == 2) {
        for (u32 i = 0; i < (count + 1) / 2; ++i) {
            apart[2 * i] = codes[i] & 15;
            apart[2 * i + 1] = codes[i] >> 4;
        }
        codes = apart;
    }
    if (begins)
        for (u32 i = 0; i < count; ++i) total[i] = W(F::value(codes[i])) * factor;
    else
        for (u32 i = 0; i < count; ++i) total[i] += W(F::value(codes[i])) * factor;
}

// Dequantise `here` elements from `place` of the rows at `row` on. Calls with a constant have no remainder.
template <class S, class F>
GC_DEV void dequantise_chunk(const DequantiseArguments& a, u64 row, u64 place, S* __restrict to, u32 here) {
    Wide<S> total[CHUNK];
    for (u32 term = 0; term < a.terms; ++term, row += a.stride) {
        const Wide<S> factor = factor_of<F>(a, row, place);
        add_values<F>(total, (const u8*)row + place / F::PER_BYTE, factor, term == 0, here);
    }
    if (a.divisor == 1)
        for (u32 i = 0; i < here; ++i) down(to[i], total[i]);
    else
        for (u32 i = 0; i < here; ++i) down(to[i], total[i] / Wide<S>(a.divisor));
}

// The plain loop for a grid of a single thread.
template <class S, class F> GC_DEV void dequantise_alone(const DequantiseArguments& a) {
    constexpr u32 MOST = F::BLOCK == 0 ? CHUNK : F::BLOCK;
    for (u64 first = 0, here; first < a.count; first += here) {
        const u64 place = first % a.share, rest = a.block - place % a.block, left = a.count - first;
        here = rest < left ? rest : left;
        here = here < MOST ? here : MOST;
        const u64 row = address_of(a.src) + first / a.share * a.stride;
        if (here == MOST)
            dequantise_chunk<S, F>(a, row, place, (S*)a.dst + first, MOST);
        else
            dequantise_chunk<S, F>(a, row, place, (S*)a.dst + first, u32(here));
    }
}

template <class S, class F> GC_DEV void dequantise(const DequantiseArguments& a) {
    if (is_alone()) return dequantise_alone<S, F>(a);
    constexpr u32 N = ITEMS<S, Word>, LEAST = F::PER_BYTE;
    const u64 addresses = address_of(a.src) | address_of(a.dst) | a.stride;
    const u64 words = addresses % sizeof(Word) == 0 && a.block % N == 0 ? a.count / N : 0, rest = a.count - words * N;
    for_batches<1>(words, [&](const auto& batch) { dequantise_part<S, F, true>(a, batch.first * N); });
    for_batches<1>((rest + LEAST - 1) / LEAST,
                   [&](const auto& batch) { dequantise_part<S, F, false>(a, words * N + batch.first * LEAST); });
}

struct MaximaArguments {
    const void* src;
    const void* before;  // may be null
    void* dst;
    u64 count, share;
    u32 parts, rows;
};

// Write the largest magnitude of each of `parts` parts of each row, in the wide type. NaN is above all numbers.
template <class S> GC_DEV void maxima(const MaximaArguments& a) {
    Wide<S>* const to = (Wide<S>*)a.dst;
    for (u32 number = blockIdx.x; number < a.parts * a.rows; number += gridDim.x) {
        const u64 row = number / a.parts, part = number % a.parts, start = row * a.share;
        u64 first = start + a.share * part / a.parts, stop = start + a.share * (part + 1) / a.parts;
        first = first < a.count ? first : a.count;
        stop = stop < a.count ? stop : a.count;
        const S* const src = (const S*)a.src;
        const S* const before = (const S*)a.before;
        if (is_alone()) {
            to[number] = largest_of(src + first, before ? before + first : nullptr, stop - first);
            continue;
        }
        Wide<S> found = 0;
        for (u64 i = first + threadIdx.x; i < stop; i += blockDim.x)
            found = maximum(found, absolute(before ? sum_of<S>(up(src[i]), up(before[i])) : up(src[i])));
        found = largest_of_threads(found);
        if (threadIdx.x == 0) to[number] = found;
    }
}
