// Reductions of the engine on the host: every op on every dtype, with the same functions as the GPU kernels
// (functions.h).
//
// float16, bfloat16 and float8 are combined in float over all ranks, and rounded once at the end. Integers, complex
// numbers and larger floats have no wider type: combining two rows at a time gives the same result. The exact sum
// needs all rows at once (exact.h).
#pragma once
#include <cstdint>
#include <cstdlib>

#define GC_PLAIN
#include "device/exact.h"
#include "engine/tables.h"

namespace gpucoll {

// Bytes of a partial result: small enough to stay in the first-level cache while all ranks' rows are added.
static const uint64_t BLOCK = 16384;

// A function object per op: inlined in the loops below.
#define GC_OP(Name, ...)                                                             \
    struct Name {                                                                    \
        template <class W> GC_DEV W operator()(W a, W b) const { return __VA_ARGS__; } \
    }
GC_OP(Add, add(a, b));
GC_OP(Multiply, multiply(a, b));
GC_OP(Minimum, minimum(a, b));
GC_OP(Maximum, maximum(a, b));
GC_OP(BitAnd, bitwise_and(a, b));
GC_OP(BitOr, bitwise_or(a, b));
GC_OP(BitXor, bitwise_xor(a, b));
GC_OP(And, W(a && b));
GC_OP(Or, W(a || b));
GC_OP(Xor, W(!a != !b));

// Read an element in its wide type, or write one. By `memcpy`: rows may begin at any byte.
template <class T> GC_DEV Wide<T> read(const char* row, uint64_t index) {
    T stored;
    __builtin_memcpy(&stored, row + index * sizeof(T), sizeof(T));
    return up(stored);
}
template <class T> GC_DEV void write(char* row, uint64_t index, Wide<T> value) {
    T stored;
    down(stored, value);
    __builtin_memcpy(row + index * sizeof(T), &stored, sizeof(T));
}

// Compile a function twice, and choose at load time: AVX2 registers are twice as wide. Both versions give the same
// bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && !defined(GC_ONE_VERSION)
#define GC_VERSIONS __attribute__((target_clones("default", "avx2")))
#else
#define GC_VERSIONS
#endif

// Write a op b to `to`. `ivdep`: `to` may equal `a` or `b`, but never overlaps partly, so the loop may be vectorised.
template <class T, class Op> GC_VERSIONS void apply(const char* a, const char* b, char* to, uint64_t count) {
#pragma GCC ivdep
    for (uint64_t i = 0; i < count; i++) write<T>(to, i, Op()(read<T>(a, i), read<T>(b, i)));
}

static const uint64_t TILE = 64;  // elements at a time: the wide partial results stay in registers or the nearest cache

// Combine a tile of a narrow dtype, from element `first` on: wide over all ranks, then rounded once.
template <class T, class Op>
GC_DEV void apply_tile(const char* const* rows, uint64_t ranks, char* to, uint64_t first, uint64_t count) {
    Wide<T> sum[TILE];
    for (uint64_t i = 0; i < count; i++) sum[i] = read<T>(rows[0], first + i);
    for (uint64_t rank = 1; rank < ranks; rank++)
        for (uint64_t i = 0; i < count; i++) sum[i] = Op()(sum[i], read<T>(rows[rank], first + i));
    for (uint64_t i = 0; i < count; i++) write<T>(to, first + i, sum[i]);
}

// Combine rows of a narrow dtype. Full tiles have a constant length, so the compiler can unroll and vectorise.
template <class T, class Op>
GC_VERSIONS void apply_rounded(const char* const* rows, uint64_t ranks, char* to, uint64_t count) {
    uint64_t first = 0;
    for (; first + TILE <= count; first += TILE) apply_tile<T, Op>(rows, ranks, to, first, TILE);
    apply_tile<T, Op>(rows, ranks, to, first, count - first);
}

// Whether two types are equal, as std::is_same.
template <class A, class B> struct Same {
    static constexpr bool value = false;
};
template <class A> struct Same<A, A> {
    static constexpr bool value = true;
};

// Write rows[0] op rows[1] op ... to `to`; `to` may be one of the rows.
template <class T, class Op> static void combine(const char* const* rows, uint64_t ranks, char* to, uint64_t nbytes) {
    if constexpr (!Same<T, Wide<T>>::value) {
        apply_rounded<T, Op>(rows, ranks, to, nbytes / sizeof(T));
    } else {
        alignas(64) char sum[BLOCK];
        // Two rows need no partial result, and so no blocks.
        const uint64_t most = ranks == 2 ? nbytes : BLOCK;
        for (uint64_t start = 0; start < nbytes; start += most) {
            const uint64_t count = (nbytes - start < most ? nbytes - start : most) / sizeof(T);
            const char* left = rows[0] + start;
            // Partial results go to `sum`: `to` may be a row still to be read. Only the last step writes to `to`.
            for (uint64_t rank = 1; rank < ranks; rank++) {
                char* here = rank + 1 == ranks ? to + start : sum;
                apply<T, Op>(left, rows[rank] + start, here, count);
                left = sum;
            }
        }
    }
}

// The running sums of a tile, by parts: loops over elements vectorise.
template <class R> struct RunningTile;
template <> struct RunningTile<float> {
    double sum[TILE];
    uint64_t lost[TILE];

    GC_DEV Running<float> get(uint64_t i) const { return {sum[i], lost[i]}; }
    GC_DEV void put(uint64_t i, const Running<float>& total) {
        sum[i] = total.sum;
        lost[i] = total.lost;
    }
};
template <> struct RunningTile<double> {
    double sum[TILE], rest[TILE];
    uint64_t lost[TILE];

    GC_DEV Running<double> get(uint64_t i) const { return {sum[i], rest[i], lost[i]}; }
    GC_DEV void put(uint64_t i, const Running<double>& total) {
        sum[i] = total.sum;
        rest[i] = total.rest;
        lost[i] = total.lost;
    }
};

// The exact sums, or means, of a tile of elements. If no element has lost bits, loops without branches do all.
template <class T, bool MEAN>
GC_DEV void exact_tile(const char* const* rows, uint64_t ranks, char* to, uint64_t first, uint64_t count) {
    RunningTile<Wide<T>> sums;
    for (uint64_t i = 0; i < count; i++) {
        Running<Wide<T>> total;
        total.start(read<T>(rows[0], first + i));
        sums.put(i, total);
    }
    for (uint64_t rank = 1; rank < ranks; rank++)
        for (uint64_t i = 0; i < count; i++) {
            Running<Wide<T>> total = sums.get(i);
            total.add(read<T>(rows[rank], first + i));
            sums.put(i, total);
        }
    uint64_t lost = 0;
    bool certain = true;
    for (uint64_t i = 0; i < count; i++) lost |= sums.lost[i];
    Wide<T> result[TILE];
    for (uint64_t i = 0; i < count; i++) result[i] = settled<T, MEAN>(sums.get(i), uint32_t(ranks), certain);
    if (lost != 0 || !certain)
        for (uint64_t i = 0; i < count; i++) {
            const auto fetch = [&](uint32_t k) { return read<T>(rows[k], first + i); };
            result[i] = exact_result<T, MEAN>(sums.get(i), uint32_t(ranks), fetch);
        }
    for (uint64_t i = 0; i < count; i++) write<T>(to, first + i, result[i]);
}

// Write the exact sums, or means, of the elements of all rows to `to`, which may be one of the rows.
template <class T, bool MEAN>
GC_VERSIONS void apply_exact(const char* const* rows, uint64_t ranks, char* to, uint64_t count) {
    uint64_t first = 0;
    for (; first + TILE <= count; first += TILE) exact_tile<T, MEAN>(rows, ranks, to, first, TILE);
    exact_tile<T, MEAN>(rows, ranks, to, first, count - first);
}
template <class T, bool MEAN>
static void combine_exactly(const char* const* rows, uint64_t ranks, char* to, uint64_t nbytes) {
    using Real = typename Exactly<T>::Real;
    apply_exact<Real, MEAN>(rows, ranks, to, nbytes / sizeof(Real));
}

// The last step of some ops: the mean of a sum, the truth value of a logical op.
template <class T> static void divide_all(char* row, uint64_t nbytes, uint64_t contributions) {
    const Wide<T> parts = Wide<T>(contributions);
    for (uint64_t i = 0; i < nbytes / sizeof(T); i++) write<T>(row, i, divide(read<T>(row, i), parts));
}
template <class T> static void make_truth(char* row, uint64_t nbytes, uint64_t) {
    for (uint64_t i = 0; i < nbytes / sizeof(T); i++) write<T>(row, i, Wide<T>(read<T>(row, i) != Wide<T>(0)));
}

using Combine = void (*)(const char* const*, uint64_t, char*, uint64_t);
using Finish = void (*)(char*, uint64_t, uint64_t);

// Return the function of an op for a dtype, or null. Complex numbers have arithmetic ops only, real numbers also
// order and truth, integers also bits.
template <class T> static Combine arithmetic(long op) {
    if constexpr (Exactly<T>::EXACT) {
        if (op == EXACT_SUM) return combine_exactly<T, false>;
        if (op == EXACT_AVG) return combine_exactly<T, true>;
    }
    return op == SUM || op == AVG ? combine<T, Add> : op == PROD ? combine<T, Multiply> : nullptr;
}

template <class T> static Combine real(long op) {
    switch (op) {
        case MIN: return combine<T, Minimum>;
        case MAX: return combine<T, Maximum>;
        case LAND: return combine<T, And>;
        case LOR: return combine<T, Or>;
        case LXOR: return combine<T, Xor>;
    }
    return arithmetic<T>(op);
}

template <class T> static Combine integer(long op) {
    switch (op) {
        case BAND: return combine<T, BitAnd>;
        case BOR: return combine<T, BitOr>;
        case BXOR: return combine<T, BitXor>;
    }
    return real<T>(op);
}

// The functions of a dtype: ops, mean and truth value; null if undefined.
struct Row {
    Combine (*combine)(long);
    Finish mean, truth;
};
template <class T> static constexpr Row whole_row() { return {integer<T>, nullptr, make_truth<T>}; }
template <class T> static constexpr Row real_row() { return {real<T>, divide_all<T>, make_truth<T>}; }
template <class T> static constexpr Row complex_row() { return {arithmetic<T>, divide_all<T>, nullptr}; }

static const Row ROWS[] = {GC_ROWS};

// Return the row of a dtype; empty for an unknown dtype.
static Row row_of(long dtype) {
    return dtype >= 0 && dtype < long(sizeof(ROWS) / sizeof(Row)) ? ROWS[dtype] : Row{};
}

static Combine combine_of(long dtype, long op) {
    const Row row = row_of(dtype);
    return row.combine == nullptr ? nullptr : row.combine(op);
}
static Finish mean_of(long dtype) { return row_of(dtype).mean; }
static Finish truth_of(long dtype) { return row_of(dtype).truth; }

}  // namespace gpucoll
