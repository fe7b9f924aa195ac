// How the engine combines arrays on the host: every op on every dtype, as the kernels do on a GPU (functions.h).
//
// float16, bfloat16 and float8 are combined in float and rounded once; all else step by step, which is the same.
#pragma once
#include <cstdint>
#include <cstdlib>

#define GC_PLAIN
#include "functions.h"
#include "tables.h"

static const uint64_t BLOCK = 16384;  // bytes of a result under way, which stay in the nearest cache

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

// Elements may begin at any byte.
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

// Two versions of a function where the processor may have wider registers: the same arithmetic, bit for bit.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && !defined(GC_ONE_VERSION)
#define GC_VERSIONS __attribute__((target_clones("default", "avx2")))
#else
#define GC_VERSIONS
#endif

template <class T, class Op> GC_VERSIONS void apply(const char* a, const char* b, char* to, uint64_t count) {
#pragma GCC ivdep
    for (uint64_t i = 0; i < count; i++) write<T>(to, i, Op()(read<T>(a, i), read<T>(b, i)));
}

static const uint64_t TILE = 64;  // elements whose wide sums stay in registers, or near them

// A tile of a dtype that is rounded, from element `first` on.
template <class T, class Op>
GC_DEV void apply_tile(const char* const* rows, uint64_t ranks, char* to, uint64_t first, uint64_t count) {
    Wide<T> sum[TILE];
    for (uint64_t i = 0; i < count; i++) sum[i] = read<T>(rows[0], first + i);
    for (uint64_t rank = 1; rank < ranks; rank++)
        for (uint64_t i = 0; i < count; i++) sum[i] = Op()(sum[i], read<T>(rows[rank], first + i));
    for (uint64_t i = 0; i < count; i++) write<T>(to, first + i, sum[i]);
}

template <class T, class Op>
GC_VERSIONS void apply_rounded(const char* const* rows, uint64_t ranks, char* to, uint64_t count) {
    uint64_t first = 0;
    for (; first + TILE <= count; first += TILE) apply_tile<T, Op>(rows, ranks, to, first, TILE);
    apply_tile<T, Op>(rows, ranks, to, first, count - first);
}

template <class A, class B> struct Same {
    static constexpr bool value = false;
};
template <class A> struct Same<A, A> {
    static constexpr bool value = true;
};

// Leaves rows[0] op rows[1] op ... at `to`, which may be one of them.
template <class T, class Op> static void combine(const char* const* rows, uint64_t ranks, char* to, uint64_t nbytes) {
    if constexpr (!Same<T, Wide<T>>::value) {
        apply_rounded<T, Op>(rows, ranks, to, nbytes / sizeof(T));
    } else {
        alignas(64) char sum[BLOCK];
        const uint64_t most = ranks == 2 ? nbytes : BLOCK;  // two go by at once
        for (uint64_t start = 0; start < nbytes; start += most) {
            const uint64_t count = (nbytes - start < most ? nbytes - start : most) / sizeof(T);
            const char* left = rows[0] + start;
            for (uint64_t rank = 1; rank < ranks; rank++) {
                char* here = rank + 1 == ranks ? to + start : sum;
                apply<T, Op>(left, rows[rank] + start, here, count);
                left = sum;
            }
        }
    }
}

// What an op does once, at the end.
template <class T> static void divide_all(char* row, uint64_t nbytes, uint64_t contributions) {
    const Wide<T> parts = Wide<T>(contributions);
    for (uint64_t i = 0; i < nbytes / sizeof(T); i++) write<T>(row, i, divide(read<T>(row, i), parts));
}
template <class T> static void make_truth(char* row, uint64_t nbytes, uint64_t) {
    for (uint64_t i = 0; i < nbytes / sizeof(T); i++) write<T>(row, i, Wide<T>(read<T>(row, i) != Wide<T>(0)));
}

using Combine = void (*)(const char* const*, uint64_t, char*, uint64_t);
using Finish = void (*)(char*, uint64_t, uint64_t);

template <class T> static Combine arithmetic(long op) {
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

// What there is for each dtype: its ops, a mean, and truth values.
struct Row {
    Combine (*combine)(long);
    Finish mean, truth;
};
template <class T> static constexpr Row whole_row() { return {integer<T>, nullptr, make_truth<T>}; }
template <class T> static constexpr Row real_row() { return {real<T>, divide_all<T>, make_truth<T>}; }
template <class T> static constexpr Row complex_row() { return {arithmetic<T>, divide_all<T>, nullptr}; }

static const Row ROWS[] = {GC_ROWS};

// Returns the row of a dtype, an empty one where there is none.
static Row row_of(long dtype) {
    return dtype >= 0 && dtype < long(sizeof(ROWS) / sizeof(Row)) ? ROWS[dtype] : Row{};
}

static Combine combine_of(long dtype, long op) {
    const Row row = row_of(dtype);
    return row.combine == nullptr ? nullptr : row.combine(op);
}
static Finish mean_of(long dtype) { return row_of(dtype).mean; }
static Finish truth_of(long dtype) { return row_of(dtype).truth; }
