// The exact sum of all contributions to an element, or the exact mean, rounded once: the bits depend on no order.
//
// A running sum (`Running`) keeps the rounding errors of its additions (Knuth's TwoSum). Without lost bits the running
// sum is the exact sum. Otherwise the contributions are read again, and added as integers in `Digits`, wide enough for
// any sum of doubles (Kulisch's accumulator). An infinity or a NaN counts as lost bits. Zero is -0 if all contributions
// are -0, else +0. A NaN is the NaN with sign 0 and one bit of mantissa.
#pragma once

#include "device/functions.h"

// A function for rare cases, not inlined: loops around a call stay short, and vectorise.
#if defined(__CUDACC__)
#define GC_APART static __device__ __noinline__
#else
#define GC_APART static __attribute__((noinline, unused))
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

constexpr u32 BELOW = 64;   // bits below the least double, for the fraction of a mean
constexpr u32 DIGITS = 70;  // 32 bits each: 64 below, 2098 of a double, 31 for the number of contributions, a sign

// A sum of doubles as an integer, in units of 2^(-1074 - BELOW). Digits are signed until `carried`.
struct Digits {
    i64 digit[DIGITS];
    bool is_nan, has_plus, has_minus, is_minus_zero;  // the last two but one: infinities
};

GC_APART void start_digits(Digits& sum) {
    for (u32 i = 0; i < DIGITS; ++i) sum.digit[i] = 0;
    sum.is_nan = sum.has_plus = sum.has_minus = false;
    sum.is_minus_zero = true;
}

GC_APART void add_digits(Digits& sum, double x) {
    const u64 bits = bits_of(x), fraction = bits & ((u64(1) << 52) - 1);
    const u32 exponent = u32(bits >> 52) & 0x7FF;
    const bool is_minus = bits >> 63 != 0;
    sum.is_minus_zero = sum.is_minus_zero && bits == u64(1) << 63;
    if (exponent == 0x7FF) {
        (fraction != 0 ? sum.is_nan : is_minus ? sum.has_minus : sum.has_plus) = true;
        return;
    }
    const u64 mantissa = exponent == 0 ? fraction : fraction | u64(1) << 52;
    const u32 place = BELOW + (exponent == 0 ? 0 : exponent - 1), shift = place % 32;
    const u64 upper = mantissa >> 1 >> (31 - shift);
    const i64 parts[3] = {i64((mantissa << shift) & 0xFFFFFFFF), i64(upper & 0xFFFFFFFF), i64(upper >> 32)};
    for (u32 i = 0; i < 3; ++i) sum.digit[place / 32 + i] += is_minus ? -parts[i] : parts[i];
}

// Bring all digits into 0 .. 2^32 - 1, as magnitude; return whether the sum is negative.
GC_APART bool carried(Digits& sum) {
    i64 carry = 0;
    for (u32 i = 0; i < DIGITS; ++i) {
        carry += sum.digit[i];
        sum.digit[i] = carry & 0xFFFFFFFF;
        carry >>= 32;
    }
    if (carry >= 0) return false;
    carry = 1;
    for (u32 i = 0; i < DIGITS; ++i) {
        carry += 0xFFFFFFFF - sum.digit[i];
        sum.digit[i] = carry & 0xFFFFFFFF;
        carry >>= 32;
    }
    return true;
}

// The binary formats to round to: bits of the mantissa with the leading bit, place of the least number's bit.
struct Format {
    u32 precision, least;
    u64 infinity;
};
constexpr Format DOUBLE = {53, BELOW, u64(0x7FF) << 52}, FLOAT = {24, BELOW + 1074 - 149, u64(0xFF) << 23};

// Return the bits of the sum / parts in `format`, rounded to nearest, ties to even, or `to_odd`.
GC_APART u64 rounded_digits(Digits& sum, u32 parts, const Format& format, bool to_odd) {
    const bool is_minus = carried(sum);
    u64 left = 0;
    u32 top = 0;  // the bit above the highest bit
    for (u32 i = DIGITS; i-- > 0;) {
        const u64 value = left << 32 | u64(sum.digit[i]);
        sum.digit[i] = i64(value / parts);
        left = value % parts;
        for (u32 bit = 32; top == 0 && bit-- > 0;)
            if (sum.digit[i] >> bit & 1) top = 32 * i + bit + 1;
    }
    const u64 sign = is_minus ? (format.infinity << 1) & ~format.infinity & ~(format.infinity - 1) : 0;
    // `last` is the place of the last bit kept.
    const u32 last = top > format.least + format.precision ? top - format.precision : format.least;
    const u32 first = last / 32, shift = last % 32;
    u64 kept = (u64(sum.digit[first]) | u64(sum.digit[first + 1]) << 32) >> shift;
    if (shift != 0) kept |= u64(sum.digit[first + 2]) << (64 - shift);
    const bool half = sum.digit[(last - 1) / 32] >> ((last - 1) % 32) & 1;
    bool below = left != 0 || (sum.digit[(last - 1) / 32] & ((i64(1) << ((last - 1) % 32)) - 1)) != 0;
    for (u32 i = 0; i < (last - 1) / 32; ++i) below = below || sum.digit[i] != 0;
    if (to_odd)
        kept |= half || below;
    else
        kept += half && (below || (kept & 1));
    // A carry out of the mantissa raises the exponent, as it must.
    const u64 bits = (u64(last - format.least) << (format.precision - 1)) + kept;
    if (bits < format.infinity) return sign | bits;
    return sign | (to_odd ? format.infinity - 1 : format.infinity);
}

// Return the exact sum or mean of contributions as bits of a double, or of a float as input of `down`.
template <class T, bool MEAN, class Fetch> GC_DEV u64 by_digits(u32 sources, const Fetch& fetch) {
    constexpr bool IS_DOUBLE = sizeof(Wide<T>) == 8;
    constexpr Format FORMAT = IS_DOUBLE ? DOUBLE : FLOAT;
    Digits sum;
    start_digits(sum);
    GC_ROLLED
    for (u32 k = 0; k < sources; ++k) add_digits(sum, fetch(k));
    const u64 quiet = u64(1) << (FORMAT.precision - 2), sign = IS_DOUBLE ? u64(1) << 63 : u64(1) << 31;
    if (sum.is_nan || (sum.has_plus && sum.has_minus)) return FORMAT.infinity | quiet;
    if (sum.has_plus || sum.has_minus) return FORMAT.infinity | (sum.has_minus ? sign : 0);
    if (sum.is_minus_zero) return sign;
    return rounded_digits(sum, MEAN ? sources : 1, FORMAT, sizeof(T) < 4);
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
