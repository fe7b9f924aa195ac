// The functions called by ops: NumPy's functions of the same names, on a single value. The results equal NumPy's bit
// for bit, except exp, log and power.
#pragma once

#include "device/number.h"

// The type of integer arithmetic: unsigned, so that sums and products wrap as NumPy's do. Overflow of signed integers
// is undefined in C++. Types below 32 bits use u32: u16 would be promoted to int, and a product could overflow again.
template <class W> struct Modular {
    typedef W Type;
    static constexpr bool INTEGER = false;
};
struct Modular32 {
    typedef u32 Type;
    static constexpr bool INTEGER = true;
};
struct Modular64 {
    typedef u64 Type;
    static constexpr bool INTEGER = true;
};
template <> struct Modular<bool> : Modular32 {};
template <> struct Modular<i8> : Modular32 {};
template <> struct Modular<i16> : Modular32 {};
template <> struct Modular<i32> : Modular32 {};
template <> struct Modular<i64> : Modular64 {};
template <> struct Modular<u8> : Modular32 {};
template <> struct Modular<u16> : Modular32 {};
template <> struct Modular<u32> : Modular32 {};
template <> struct Modular<u64> : Modular64 {};
template <class W> using Wrapping = typename Modular<W>::Type;

template <class R> GC_DEV Complex<R> operator+(Complex<R> a, Complex<R> b) { return {a.re + b.re, a.im + b.im}; }
template <class R> GC_DEV Complex<R> operator-(Complex<R> a, Complex<R> b) { return {a.re - b.re, a.im - b.im}; }
template <class R> GC_DEV Complex<R> operator-(Complex<R> a) { return {-a.re, -a.im}; }
template <class R> GC_DEV Complex<R> operator*(Complex<R> a, Complex<R> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class R> GC_DEV bool operator!=(Complex<R> a, Complex<R> b) { return a.re != b.re || a.im != b.im; }

template <class W> GC_DEV W add(W a, W b) { return W(Wrapping<W>(a) + Wrapping<W>(b)); }
template <class W> GC_DEV W subtract(W a, W b) { return W(Wrapping<W>(a) - Wrapping<W>(b)); }
template <class W> GC_DEV W multiply(W a, W b) { return W(Wrapping<W>(a) * Wrapping<W>(b)); }
template <class W> GC_DEV W positive(W a) { return a; }
template <class W> GC_DEV W negative(W a) { return W(-Wrapping<W>(a)); }
template <class W> GC_DEV W divide(W a, W b) { return a / b; }

// Floats clear the sign bit: a comparison would keep the sign of -0 and NaN.
template <class W> GC_DEV W absolute(W a) { return a < W(0) ? negative(a) : a; }
GC_DEV bool absolute(bool a) { return a; }
GC_DEV float absolute(float a) { return float_of(bits_of(a) & 0x7FFFFFFF); }
GC_DEV double absolute(double a) { return double_of(bits_of(a) & 0x7FFFFFFFFFFFFFFF); }

// Smith's method, as in NumPy: dividing by the larger part first avoids overflow of intermediate results.
template <class R> GC_DEV Complex<R> divide(Complex<R> a, Complex<R> b) {
    const R re = absolute(b.re), im = absolute(b.im);
    if (re == 0 && im == 0) return {a.re / re, a.im / re};
    if (re >= im) {
        const R ratio = b.im / b.re, scale = R(1) / (b.re + b.im * ratio);
        return {(a.re + a.im * ratio) * scale, (a.im - a.re * ratio) * scale};
    }
    const R ratio = b.re / b.im, scale = R(1) / (b.im + b.re * ratio);
    return {(a.re * ratio + a.im) * scale, (a.im * ratio - a.re) * scale};
}

// A NaN in either argument is the result, as in NumPy: `b != b` catches a NaN in b, the comparison keeps a NaN in a.
template <class W> GC_DEV W minimum(W a, W b) { return b < a || b != b ? b : a; }
template <class W> GC_DEV W maximum(W a, W b) { return b > a || b != b ? b : a; }

template <class W> GC_DEV W bitwise_and(W a, W b) { return W(a & b); }
template <class W> GC_DEV W bitwise_or(W a, W b) { return W(a | b); }
template <class W> GC_DEV W bitwise_xor(W a, W b) { return W(a ^ b); }
template <class W> GC_DEV W invert(W a) { return W(~Wrapping<W>(a)); }
GC_DEV bool invert(bool a) { return !a; }

// Shifts by the width or more are undefined in C++. Here they give 0, or -1 for a right shift of a negative number.
template <class W> GC_DEV bool is_shift(W b) { return Wrapping<W>(b) < 8 * sizeof(W); }
template <class W> GC_DEV W left_shift(W a, W b) { return is_shift(b) ? W(Wrapping<W>(a) << b) : W(0); }
template <class W> GC_DEV W right_shift(W a, W b) { return is_shift(b) ? W(a >> b) : W(a < W(0) ? -1 : 0); }

template <class W> GC_DEV W sqrt(W a) { return root(a); }
template <class W> GC_DEV W exp(W a) { return exponential(a); }
template <class W> GC_DEV W log(W a) { return logarithm(a); }

GC_DEV float power(float a, float b) { return raised(a, b); }
GC_DEV double power(double a, double b) { return raised(a, b); }
// Integer power by squaring: a number of steps logarithmic in b. NumPy refuses negative exponents; here they give 1.
template <class W> GC_DEV W power(W a, W b) {
    W product = W(1);
    for (; b > W(0); b = W(b >> 1), a = multiply(a, a))
        if (b & W(1)) product = multiply(product, a);
    return product;
}

// Return x as a float if exact, else the neighbouring float with an odd last bit (round to odd). Rounding the result
// again to a narrower float equals rounding x directly: the odd bit prevents a false tie.
GC_DEV float odd_float(double x) {
    const double nearest = float(x);
    u32 bits = bits_of(float(x));
    // Towards zero first; then the last bit is set if x lies between two floats.
    if (absolute(nearest) > absolute(x)) --bits;
    return float_of(nearest != x ? bits | 1 : bits);
}

// Conversion between the wide types of S and D. float64 to float16 rounds once, as in NumPy; to other
// narrow floats through float, as in ml_dtypes.
template <class S, class D> struct Between {
    static GC_DEV Wide<D> of(Wide<S> x) { return Wide<D>(x); }
};
template <> struct Between<double, Float16> {
    static GC_DEV float of(double x) { return odd_float(x); }
};
