// The exact sum of all contributions to an element, or the exact mean, rounded once: the bits depend on no order.
//
// A running sum (`Running`) keeps the rounding errors of its additions (Knuth's TwoSum). Without lost bits the running
// sum is the exact sum. Otherwise the contributions are read again, and added as integers in `Digits`, wide enough for
// any sum of doubles (Kulisch's accumulator). An infinity or a NaN counts as lost bits. Zero is -0 if all contributions
// are -0, else +0. A NaN is the NaN with sign 0 and one bit of mantissa.
#pragma once

#include "device/functions.h"

// A function for rare cases. On the CPU it is not inlined: loops around a call stay short, and vectorise. On a GPU a
// call would spill registers.
#if defined(__CUDACC__)
#define GC_RARE GC_DEV
#else
#define GC_RARE static __attribute__((noinline, unused))
#endif

// The bits left in an error term; 0 for +0 and -0.
GC_DEV u64 bits_left(double error) { return bits_of(error) << 1; }

// Return a + b rounded, and the rounding error: their sum is exact. An infinity or a NaN gives a NaN as error.
GC_DEV double two_sum(double a, double b, double& error) {
    const double sum = a + b, part = sum - a;
    error = (a - (sum - part)) + (b - part);
    return sum;
}

// The contributions so far, by the wide type of the dtype. `lost` is 0 as long as the sum is exact.
template <class R> struct Running;
template <> struct Running<float> {
    double sum;
    u64 lost;

    GC_DEV void start(float x) {
        sum = x;
        lost = 0;
    }
    GC_DEV void add(float x) {
        double error;
        sum = two_sum(sum, x, error);
        lost |= bits_left(error);
    }
};
template <> struct Running<double> {
    double sum, rest;  // the sum is sum + rest
    u64 lost;

    GC_DEV void start(double x) {
        sum = x;
        rest = 0;
        lost = 0;
    }
    GC_DEV void add(double x) {
        double error, error_of_rest;
        sum = two_sum(sum, x, error);
        rest = two_sum(rest, error, error_of_rest);
        lost |= bits_left(error_of_rest);
    }
};

// Return sum - quotient * parts without error, for the quotient of sum and parts, parts < 2^26. Either half of the
// quotient's bits times `parts` is exact.
GC_DEV double remainder_of(double sum, double quotient, double parts) {
    const double high = double_of(bits_of(quotient) & ~u64(0x7FFFFFF));
    return (sum - high * parts) - (quotient - high) * parts;
}

// Return sum / parts if exact, else the neighbouring double with an odd last bit; see `odd_float`.
GC_DEV double odd_quotient(double sum, double parts) {
    const double quotient = sum / parts, left = remainder_of(sum, quotient, parts);
    const u64 bits = bits_of(quotient);
    if (left == 0 || bits & 1) return quotient;
    return double_of((left > 0) == (quotient > 0) ? bits + 1 : bits - 1);
}

// Round a double to the wide type, as input of `down`: a narrow type is rounded there, so here to odd.
template <class T> struct Rounded {
    static GC_DEV float of(double value) { return odd_float(value); }
};
template <> struct Rounded<float> {
    static GC_DEV float of(double x) { return float(x); }
};

// Return the result of a running sum without lost bits; clear `certain` if the bits do not suffice.
template <class T, bool MEAN> GC_DEV float settled(const Running<float>& total, u32 parts, bool&) {
    if (!MEAN) return Rounded<T>::of(total.sum);
    // A power of two divides without error.
    const bool is_power = (parts & (parts - 1)) == 0;
    return Rounded<T>::of(is_power ? total.sum / parts : odd_quotient(total.sum, parts));
}
template <class T, bool MEAN> GC_DEV double settled(const Running<double>& total, u32 parts, bool& certain) {
    const double sum = total.sum, rest = total.rest, bare = rest == 0 ? sum : sum + rest;
    if (!MEAN || bare == 0) return bare;
    // Quotients below 2^-900 or so could be subnormal, with other rounding errors than estimated below.
    if (absolute(sum) < double_of(u64(123) << 52)) certain = false;
    const double quotient = sum / parts;
    if ((parts & (parts - 1)) == 0) return rest == 0 ? quotient : quotient + rest / parts;
    // The correction is known to 50 bits or more: the result is certain if 2^-48 more or less makes no difference.
    const double correction = (remainder_of(sum, quotient, parts) + rest) / parts;
    const double margin = absolute(correction) * double_of(u64(1023 - 48) << 52);
    const double low = quotient + (correction - margin), high = quotient + (correction + margin);
    if (low != high) certain = false;
    return low;
}

// ---------------------------------------------------------------- rare cases

// A sum of doubles is an integer in units of 2^(-1074 - BELOW). Its digits have 32 bits each. They are formed one after
// the other, the lowest first, each from all contributions: so a thread keeps only the highest ones, in registers.
constexpr u32 BELOW = 96;  // three digits below the least double

// The place of the lowest bit of a double's mantissa.
GC_DEV u32 place_of(double x) {
    const u32 exponent = u32(bits_of(x) >> 52) & 0x7FF;
    return BELOW + (exponent == 0 ? 0 : exponent - 1);
}

// Return what a finite double adds to digit `number`.
GC_DEV i64 digit_of(double x, u32 number) {
    const u64 bits = bits_of(x), fraction = bits & ((u64(1) << 52) - 1), one = u64(1) << 52;
    const u64 mantissa = (bits << 1 >> 53) == 0 ? fraction : fraction | one;
    const i32 low = i32(32 * number) - i32(place_of(x));
    if (low <= -32 || low >= 53) return 0;
    const i64 part = i64((low < 0 ? mantissa << -low : mantissa >> low) & 0xFFFFFFFF);
    return bits >> 63 ? -part : part;
}

// The four highest digits of a positive sum, from place `lowest` on; `below` says whether a lower bit is set.
struct Highest {
    u64 upper, lower;
    u32 lowest;
    bool below;
};

// Return whether sign * sum is negative, else its highest digits in `found`; digits `first` to `end` are not all 0.
template <class Fetch>
GC_DEV bool is_negative(u32 sources, const Fetch& fetch, i64 sign, u32 first, u32 end, Highest& found) {
    i64 carry = 0;
    u64 upper = 0, lower = 0;
    bool below = false;
    found = {0, 0, 0, false};
    GC_ROLLED
    for (u32 number = first; number < end; ++number) {
        GC_ROLLED
        for (u32 k = 0; k < sources; ++k) carry += sign * digit_of(fetch(k), number);
        below = below || (lower & 0xFFFFFFFF) != 0;
        lower = lower >> 32 | upper << 32;
        upper = upper >> 32 | u64(carry) << 32;
        carry >>= 32;
        if (upper >> 32 != 0) found = {upper, lower, 32 * (number - 3), below};
    }
    return carry < 0;
}

// Divide the digits by a number of contributions; what is lost counts as a bit below.
GC_DEV void divide(Highest& digits, u32 parts) {
    u64 left = 0;
    const auto by_parts = [&](u64 two) {
        const u64 high = left << 32 | two >> 32, low = high % parts << 32 | (two & 0xFFFFFFFF);
        left = low % parts;
        return high / parts << 32 | low / parts;
    };
    digits.upper = by_parts(digits.upper);
    digits.lower = by_parts(digits.lower);
    digits.below = digits.below || left != 0;
}

// The binary formats to round to: bits of the mantissa with the leading bit, place of the least number's bit.
struct Format {
    u32 precision, least;
    u64 infinity;
};
constexpr Format DOUBLE = {53, BELOW, u64(0x7FF) << 52}, FLOAT = {24, BELOW + 1074 - 149, u64(0xFF) << 23};

// Return the bits of a positive number in `format`, rounded to nearest, ties to even, or `to_odd`.
GC_DEV u64 rounded(Highest digits, const Format& format, bool to_odd) {
    u32 top = digits.lowest + 128;  // the place above the highest bit
    GC_ROLLED
    for (; digits.upper >> 63 == 0; --top) {
        digits.upper = digits.upper << 1 | digits.lower >> 63;
        digits.lower <<= 1;
    }
    // The place of the last bit kept, and the number of bits of `upper` below the one to be rounded.
    const u32 last = top > format.least + format.precision ? top - format.precision : format.least;
    const u32 cut = last + 63 - top;
    const u64 kept_and_half = cut < 64 ? digits.upper >> cut : 0, lost = digits.upper - (kept_and_half << (cut & 63));
    const bool below = lost != 0 || digits.lower != 0 || digits.below;
    u64 kept = kept_and_half >> 1;
    const bool half = kept_and_half & 1;
    if (to_odd)
        kept |= half || below;
    else
        kept += half && (below || (kept & 1));
    // A carry out of the mantissa raises the exponent, as it must.
    const u64 bits = (u64(last - format.least) << (format.precision - 1)) + kept;
    if (bits < format.infinity) return bits;
    return to_odd ? format.infinity - 1 : format.infinity;
}

// Return the exact sum or mean of contributions as bits of a double, or of a float as input of `down`.
template <class T, bool MEAN, class Fetch> GC_RARE u64 by_digits(u32 sources, const Fetch& fetch) {
    constexpr bool IS_DOUBLE = sizeof(Wide<T>) == 8;
    constexpr Format FORMAT = IS_DOUBLE ? DOUBLE : FLOAT;
    constexpr u64 QUIET = u64(1) << (FORMAT.precision - 2), MINUS = IS_DOUBLE ? u64(1) << 63 : u64(1) << 31;
    bool is_nan = false, has_plus = false, has_minus = false, is_minus_zero = true;
    u32 lowest = ~u32(0), highest = 0;
    GC_ROLLED
    for (u32 k = 0; k < sources; ++k) {
        const double x = fetch(k);
        const u64 bits = bits_of(x), infinity = u64(0x7FF) << 52;
        is_minus_zero = is_minus_zero && bits == u64(1) << 63;
        is_nan = is_nan || bits << 1 > infinity << 1;
        has_plus = has_plus || bits == infinity;
        has_minus = has_minus || bits == (infinity | u64(1) << 63);
        const u32 place = place_of(x);
        lowest = place < lowest ? place : lowest;
        highest = place > highest ? place : highest;
    }
    if (is_nan || (has_plus && has_minus)) return FORMAT.infinity | QUIET;
    if (has_plus || has_minus) return FORMAT.infinity | (has_minus ? MINUS : 0);
    if (is_minus_zero) return MINUS;
    // A mantissa reaches into three digits, and the number of contributions into one more.
    const u32 first = lowest / 32, end = highest / 32 + 4;
    Highest digits;
    i64 sign = 1;
    GC_ROLLED
    while (is_negative(sources, fetch, sign, first, end, digits)) sign = -1;
    if (digits.upper == 0) return 0;
    if constexpr (MEAN) divide(digits, sources);
    return rounded(digits, FORMAT, sizeof(T) < 4) | (sign < 0 ? MINUS : 0);
}

template <class R> struct Value;
template <> struct Value<float> {
    static GC_DEV float of(u64 bits) { return float_of(u32(bits)); }
};
template <> struct Value<double> {
    static GC_DEV double of(u64 bits) { return double_of(bits); }
};

// ---------------------------------------------------------------- an element

// Return the exact sum or mean from a running sum, or from the contributions `fetch(0)`, `fetch(1)`, ... read again.
template <class T, bool MEAN, class Fetch>
GC_DEV Wide<T> exact_result(const Running<Wide<T>>& total, u32 sources, const Fetch& fetch) {
    bool certain = total.lost == 0;
    const Wide<T> result = settled<T, MEAN>(total, sources, certain);
    return certain ? result : Value<Wide<T>>::of(by_digits<T, MEAN>(sources, fetch));
}

// Return the exact sum or mean of the contributions `fetch(0)`, ..., in the wide type, as input of `down`.
template <class T, bool MEAN, class Fetch> GC_DEV Wide<T> exact_of(u32 sources, const Fetch& fetch) {
    Running<Wide<T>> total;
    total.start(fetch(0));
    GC_ROLLED
    for (u32 k = 1; k < sources; ++k) total.add(fetch(k));
    return exact_result<T, MEAN>(total, sources, fetch);
}

// The real type of the elements: a complex number is two of them. `EXACT` says that there is an exact sum.
template <class T> struct Exactly {
    typedef T Real;
    static constexpr bool EXACT = false;
};
template <> struct Exactly<float> {
    typedef float Real;
    static constexpr bool EXACT = true;
};
template <> struct Exactly<double> {
    typedef double Real;
    static constexpr bool EXACT = true;
};
template <class R> struct Exactly<Complex<R>> : Exactly<R> {};
template <class Code, u32 E, u32 M, bool I, u32 X> struct Exactly<SmallFloat<Code, E, M, I, X>> {
    typedef SmallFloat<Code, E, M, I, X> Real;
    static constexpr bool EXACT = true;
};

// The ops of the exact sum and the exact mean, in place of an op on two values.
template <bool WITH_MEAN> struct ExactOp {
    static constexpr bool MEAN = WITH_MEAN;
};
template <class Op> struct IsExact {
    static constexpr bool value = false;
};
template <bool MEAN> struct IsExact<ExactOp<MEAN>> {
    static constexpr bool value = true;
};
